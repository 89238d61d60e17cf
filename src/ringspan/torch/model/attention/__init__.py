"""Replacement of a model's attention by the ring's."""
