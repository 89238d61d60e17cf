"""Heads, feed-forwards and vocabulary split over a further axis."""
