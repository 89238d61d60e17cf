"""Parts of a model that are changed on a ring: run in blocks of tokens, split over ranks, given global positions."""
