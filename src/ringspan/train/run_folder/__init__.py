"""A run's folder: identity, resuming, result."""
