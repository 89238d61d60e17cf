"""The JAX back end: the same geometry, carried out by ``shard_map`` and ``ppermute``. Needs ``ringspan[jax]``."""

from ringspan.jax.attention import ring_attention, sharded_ring_attention

__all__ = ["ring_attention", "sharded_ring_attention"]
