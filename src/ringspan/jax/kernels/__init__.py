"""Attention of one block of queries to one of keys: XLA, Pallas, Triton."""
