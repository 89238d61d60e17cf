"""lm-evaluation-harness over a ring."""
