"""Layouts, masks, and the tiles where they meet."""
