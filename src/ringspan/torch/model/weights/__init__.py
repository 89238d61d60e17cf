"""Weights from safetensors files to shards and back, a slice or a tensor at a time."""
