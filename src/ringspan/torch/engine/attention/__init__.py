"""Exact attention over a ring: the operator, its loop, and what travels."""
