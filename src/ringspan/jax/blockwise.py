"""Feed-forwards and the loss some tokens at a time. T local tokens, C hidden size, V (local) vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.numbers import integer
from ringspan.jax.batch import IGNORED
from ringspan.jax.kernels.xla import varying_like


def blockwise_feedforward(
    function: Callable[[Array], Array], x: Array, *, chunk_tokens: int = 1024
) -> Array:
    """``function(x)`` for a function of single tokens, ``chunk_tokens`` at a time, recomputed in backward.

    Args:
        function: maps (n, C) to (n, C'), each row by itself.
        x: (..., T, C); batches count as tokens.
        chunk_tokens: tokens whose activations inside ``function`` exist at once.

    Returns:
        (..., T, C').

    Raises:
        ConfigError: ``chunk_tokens`` is not an integer of at least one.
        UnsupportedError: ``function`` returns other than one row per row.

    Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models".
    """
    rows = x.reshape(-1, x.shape[-1])
    pieces = chunks(rows, chunk_tokens)
    made = jax.eval_shape(function, pieces[0])
    if getattr(made, "shape", ())[:-1] != pieces.shape[1:2]:
        shown = getattr(made, "shape", type(made).__name__)
        raise UnsupportedError(
            f"function must map n rows to one array of n rows, got {shown} of {pieces.shape[1:]}"
        )
    out = lax.map(jax.checkpoint(function), pieces)
    return out.reshape(-1, out.shape[-1])[: len(rows)].reshape(
        *x.shape[:-1], out.shape[-1]
    )


def chunks(rows: Array, chunk_tokens: int, *, value: float | None = None) -> Array:
    """Cut (T, ...) into (number, size, ...): the fewest, most equal chunks, padded with ``value`` or the last row."""
    # Padding repeats the last row: a function without a derivative at 0 would give NaN, and 0 times NaN is NaN.
    chunk_tokens = integer(chunk_tokens, "chunk_tokens", ConfigError, at_least=1)
    number = max(1, -(-len(rows) // chunk_tokens))
    size = -(-len(rows) // number)
    width = [(0, number * size - len(rows))] + [(0, 0)] * (rows.ndim - 1)
    if value is not None:
        rows = jnp.pad(rows, width, constant_values=value)
    elif len(rows):
        rows = jnp.pad(rows, width, mode="edge")
    return rows.reshape(number, size, *rows.shape[1:])


def blockwise_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    chunk_tokens: int = 1024,
    vocabulary_axis: str | None = None,
) -> Array:
    """Sum the cross-entropy of ``hidden @ weight.T`` in float32, ``chunk_tokens`` at a time, recomputed in backward.

    ``-sum(log_softmax(hidden @ weight.T)[t, targets[t]])`` over tokens with a target; the others' hidden states, NaN
    too, change neither loss nor gradient. A target outside the vocabulary raises if its value is known; inside ``jit``
    it makes loss and gradients NaN.

    Args:
        hidden: (T, C); weight (V, C); targets (T,) integers, -100 for none.
        chunk_tokens: tokens whose V logits exist at once.
        vocabulary_axis: the mesh axis that splits the rows of ``weight``, inside ``shard_map``.

    Returns:
        A float32 scalar; 0 when no token has a target.

    Raises:
        ConfigError: ``chunk_tokens`` that is not an integer or below one.
        UnsupportedError: shapes that do not fit, targets that are not integers, or (outside ``jit``) too large.
    """
    vocabulary = len(weight) * (
        lax.axis_size(vocabulary_axis) if vocabulary_axis else 1
    )
    _check(hidden, weight, targets, vocabulary)
    # Unsigned targets become int32, since -100 would be 156 in uint8 and hide that target.
    kind = jnp.result_type(targets)
    if jnp.issubdtype(kind, jnp.unsignedinteger):
        bounded = (
            jnp.minimum(targets, np.iinfo(np.int32).max)
            if kind.itemsize >= 4
            else targets
        )
        targets = jnp.asarray(bounded).astype(jnp.int32)
    first = lax.axis_index(vocabulary_axis) * len(weight) if vocabulary_axis else 0

    def total(x: Array) -> Array:
        return lax.psum(x, vocabulary_axis) if vocabulary_axis else x

    @jax.checkpoint
    def one_chunk(loss: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        """Add the loss of a chunk of tokens: ``lse - logits[target]``, over all parts of the vocabulary.

        Each device has the logits of its rows of ``weight`` only: the maximum, the sum of exponentials and the target's
        logit, which one device has, are combined over the axis.
        """
        rows, target = chunk
        # Zero hidden states without a target: 0 times NaN would be NaN in the weight's gradient.
        rows = jnp.where((target == IGNORED)[:, None], 0, rows)
        logits = lax.dot_general(
            rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        top = lax.stop_gradient(logits).max(-1)
        top = lax.pmax(top, vocabulary_axis) if vocabulary_axis else top
        lse = top + jnp.log(total(jnp.exp(logits - top[:, None]).sum(-1)))
        local = target - first
        is_here = (local >= 0) & (local < len(weight))
        picked = jnp.take_along_axis(logits, jnp.where(is_here, local, 0)[:, None], 1)[
            :, 0
        ]
        picked = total(jnp.where(is_here, picked, 0))
        is_known = (target == IGNORED) | ((target >= 0) & (target < vocabulary))
        # NaN is a factor, so that gradients are NaN too.
        losses = (lse - picked) * jnp.where(is_known, 1, jnp.nan)
        return loss + jnp.where(target == IGNORED, 0, losses).sum(), None

    pieces = chunks(hidden, chunk_tokens), chunks(targets, chunk_tokens, value=IGNORED)
    start = varying_like(jnp.zeros((), jnp.float32), hidden, targets)
    return lax.scan(one_chunk, start, pieces)[0]


def _check(hidden: Array, weight: Array, targets: Array, vocabulary: int) -> None:
    """Raise UnsupportedError unless shapes fit and targets are integers, if known within the vocabulary."""
    shapes = [tuple(jnp.shape(x)) for x in (hidden, weight, targets)]
    if [len(shape) for shape in shapes] != [2, 2, 1] or shapes[0] != (
        *shapes[2],
        shapes[1][1],
    ):
        raise UnsupportedError(
            f"shapes do not fit: hidden {shapes[0]}, weight {shapes[1]}, targets {shapes[2]}; they must be "
            "(tokens, size), (vocabulary, size) and (tokens,)"
        )
    if not jnp.issubdtype(jnp.result_type(targets), jnp.integer):
        raise UnsupportedError(
            f"targets must be integers, got {jnp.result_type(targets)}"
        )
    if isinstance(targets, jax.core.Tracer):
        return
    values = np.asarray(targets)
    unknown = values[(values != IGNORED) & ((values < 0) | (values >= vocabulary))]
    if unknown.size:
        raise UnsupportedError(
            f"target {unknown[0]} is no entry of a vocabulary of {vocabulary}; use {IGNORED} for no target"
        )
