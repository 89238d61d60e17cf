"""Layers of single tokens, computed some tokens at a time: their wide activations never exist whole.

T local tokens, C hidden size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.numbers import integer


def blockwise_feedforward(function: Callable[[Array], Array], x: Array, *, chunk_tokens: int = 1024) -> Array:
    """``function(x)`` for a function of single tokens, ``chunk_tokens`` at a time, recomputed in backward.

    Args:
        function: maps (n, C) to (n, C'), each row by itself.
        x: (..., T, C); batches count as tokens.
        chunk_tokens: tokens whose activations inside ``function`` exist at once.

    Returns:
        (..., T, C').

    Raises:
        ConfigError: ``chunk_tokens`` that is not an integer or below one.
        UnsupportedError: ``function`` does not return one row for each row.

    Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models".
    """
    rows = x.reshape(-1, x.shape[-1])
    pieces = chunks(rows, chunk_tokens)
    made = jax.eval_shape(function, pieces[0])
    if getattr(made, "shape", ())[:-1] != pieces.shape[1:2]:
        shown = getattr(made, "shape", type(made).__name__)
        raise UnsupportedError(f"function must map n rows to one array of n rows, got {shown} of {pieces.shape[1:]}")
    out = lax.map(jax.checkpoint(function), pieces)
    return out.reshape(-1, out.shape[-1])[: len(rows)].reshape(*x.shape[:-1], out.shape[-1])


def chunks(rows: Array, chunk_tokens: int, *, value: float | None = None) -> Array:
    """Cut (T, ...) into (number, size, ...): the fewest, most equal chunks, padded with ``value`` or the last row.

    The last row, since 0 times NaN is NaN for a function without a derivative at zero.
    """
    chunk_tokens = integer(chunk_tokens, "chunk_tokens", ConfigError, at_least=1)
    number = max(1, -(-len(rows) // chunk_tokens))
    size = -(-len(rows) // number)
    width = [(0, number * size - len(rows))] + [(0, 0)] * (rows.ndim - 1)
    if value is not None:
        rows = jnp.pad(rows, width, constant_values=value)
    elif len(rows):
        rows = jnp.pad(rows, width, mode="edge")
    return rows.reshape(number, size, *rows.shape[1:])
