"""Training a Hugging Face causal LM on a mesh of processes: configuration, data, loop, checkpoints, guard, metrics."""
