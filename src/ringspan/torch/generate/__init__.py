"""Generation on the mesh that trained the model: transformers' own ``generate`` over a cache split over the ring."""
