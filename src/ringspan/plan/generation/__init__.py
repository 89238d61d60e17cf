"""Cost of generating text on a cluster: memory, time to the first token and of each one after it."""
