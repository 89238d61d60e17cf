"""Moved to an example."""

raise ImportError("ringspan.jax.checkpoint is now part of examples/jax_llama.py in the repository: copy that file")
