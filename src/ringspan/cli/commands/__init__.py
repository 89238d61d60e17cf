"""A file per command: parse, call, print."""
