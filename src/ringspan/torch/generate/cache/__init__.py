"""Keys and values split over a ring: held, quantised, saved."""
