"""What generating text on a cluster takes: memory, time to the first token and of each after it."""
