"""Layers that compute block by block of tokens."""
