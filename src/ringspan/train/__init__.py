"""Training of a Hugging Face causal LM on a mesh of processes."""
