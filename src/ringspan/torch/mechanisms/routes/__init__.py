"""Routes of tokens through mixtures of experts: given in a batch and replayed, or recorded."""
