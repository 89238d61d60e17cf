"""The JAX back end: the same geometry by ``shard_map`` and ``ppermute``. Needs ``ringspan[jax]``."""

# ruff: noqa: E402 - asked for before the modules below import it
from ringspan.core.messages.extras import require

require("ringspan.jax", "jax")

from ringspan.jax.attention import ring_attention, sharded_ring_attention
from ringspan.jax.batch import shard, shard_batch, unshard
from ringspan.jax.blockwise import blockwise_cross_entropy, blockwise_feedforward
from ringspan.jax.mesh import init_mesh, map_mesh

__all__ = [
    "blockwise_cross_entropy", "blockwise_feedforward", "init_mesh", "map_mesh", "ring_attention", "shard",
    "shard_batch", "sharded_ring_attention", "unshard",
]  # fmt: skip
