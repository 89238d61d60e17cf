"""What a run is continued from."""
