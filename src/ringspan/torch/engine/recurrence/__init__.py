"""Layers with a state, and causal convolutions, over a sequence that is split over a ring into spans."""
