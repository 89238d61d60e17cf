"""Layouts, masks, and the tiles of their intersections."""
