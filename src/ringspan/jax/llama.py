"""Moved to an example."""

raise ImportError("ringspan.jax.llama is now part of examples/jax_llama.py in the repository: copy that file")
