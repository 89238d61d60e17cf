"""Text from a model's folder on a ring of ranks: the work of ``ringspan generate``."""
