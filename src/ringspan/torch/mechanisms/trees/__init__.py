"""Trees of segments: rows that share prefixes, computed once."""
