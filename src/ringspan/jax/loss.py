"""From hidden states to the loss in blocks: the tokens x vocabulary logits never exist whole.

T local tokens, C hidden size, V vocabulary (its local part where it is split over a mesh axis).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringspan.jax.batch import IGNORED
from ringspan.jax.feedforward import chunks
from ringspan.jax.kernels import varying_like


def blockwise_cross_entropy(
    hidden: Array, weight: Array, targets: Array, *, chunk_tokens: int = 1024, vocabulary_axis: str | None = None
) -> Array:
    """Summed cross-entropy of ``hidden @ weight.T`` in float32, ``chunk_tokens`` at a time, recomputed in backward.

    Equals ``-sum(log_softmax(hidden @ weight.T)[t, targets[t]])`` over the tokens with a target.

    Args:
        hidden: (T, C); weight (V, C); targets (T,) integers, -100 for none.
        chunk_tokens: tokens whose V logits exist at once.
        vocabulary_axis: the mesh axis over which the rows of ``weight`` are split, inside ``shard_map``.

    Returns:
        A float32 scalar; 0 when no token has a target.

    Raises:
        ConfigError: ``chunk_tokens`` below one.
    """
    first = lax.axis_index(vocabulary_axis) * len(weight) if vocabulary_axis else 0

    def total(x: Array) -> Array:
        return lax.psum(x, vocabulary_axis) if vocabulary_axis else x

    @jax.checkpoint
    def one_chunk(loss: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        rows, target = chunk
        logits = lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        top = lax.stop_gradient(logits).max(-1)
        top = lax.pmax(top, vocabulary_axis) if vocabulary_axis else top
        lse = top + jnp.log(total(jnp.exp(logits - top[:, None]).sum(-1)))
        local = target - first
        is_here = (local >= 0) & (local < len(weight))
        picked = jnp.take_along_axis(logits, jnp.where(is_here, local, 0)[:, None], 1)[:, 0]
        picked = total(jnp.where(is_here, picked, 0))
        return loss + jnp.where(target == IGNORED, 0, lse - picked).sum(), None

    pieces = chunks(hidden, chunk_tokens), chunks(targets, chunk_tokens, value=IGNORED)
    start = varying_like(jnp.zeros((), jnp.float32), hidden, targets)
    return lax.scan(one_chunk, start, pieces)[0]
