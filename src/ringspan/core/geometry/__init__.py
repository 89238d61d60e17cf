"""Who may see whom: layouts, masks, and the tiles where they meet."""
