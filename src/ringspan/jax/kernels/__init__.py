"""Attention of one block of queries to one block of keys: XLA, Pallas, Triton."""
