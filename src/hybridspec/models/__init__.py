"""Model definitions, configurations and weight loading."""
