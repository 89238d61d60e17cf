"""The engine: attention over a ring, its kernels and messages, and layers with a state over spans."""
