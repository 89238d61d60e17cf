"""Parts of a model that run otherwise on a ring: in blocks of tokens, split over ranks, with global positions."""
