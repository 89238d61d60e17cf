"""Generation on the training mesh: transformers' ``generate`` over a cache split over the ring."""
