"""Exactness of a model with some options, tried on the ranks and releases at hand: ``ringspan prove``."""
