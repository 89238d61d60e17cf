"""What a model is made of, and where it comes from."""
