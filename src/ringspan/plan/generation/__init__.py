"""Cost of generating text on a cluster."""
