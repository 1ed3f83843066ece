"""Models: from a folder in the Hugging Face layout to logits over the pools."""
