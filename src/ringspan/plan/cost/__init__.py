"""FLOPs, seconds and bytes of one way to run a step."""
