"""The folder of a run: whose it is, resuming from it, and what is left in it at the end."""
