"""Text from a folder's model on a ring of ranks."""
