"""Keys and values of a text, split over a ring: held, quantised, saved."""
