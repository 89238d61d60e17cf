"""Text from a model's folder on a ring of ranks: what ``ringspan generate`` does."""
