"""Training form, data and export of the model that the package carries."""
