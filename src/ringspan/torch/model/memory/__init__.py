"""Memory of a training step: weight shards, activations and offloading."""
