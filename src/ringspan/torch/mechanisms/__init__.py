"""Mechanisms: what each adds to a model, a batch, a pass and a cache, in one object each."""
