"""Attention to keys that an index chooses: what a rank fetches, chooses, attends to and learns."""
