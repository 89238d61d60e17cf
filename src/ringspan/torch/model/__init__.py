"""Models of transformers on the ring: support, arguments and outputs."""
