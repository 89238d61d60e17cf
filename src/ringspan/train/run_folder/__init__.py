"""The folder of a run: its identity, resuming, and the result."""
