"""Layers that treat each token alone, computed some tokens at a time: their wide activations never exist whole.

T local tokens, C hidden size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringspan.core.errors import ConfigError
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
        ConfigError: ``chunk_tokens`` that is no integer or below one.

    Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models".
    """
    rows = x.reshape(-1, x.shape[-1])
    out = lax.map(jax.checkpoint(function), chunks(rows, chunk_tokens))
    return out.reshape(-1, out.shape[-1])[: len(rows)].reshape(*x.shape[:-1], out.shape[-1])


def chunks(rows: Array, chunk_tokens: int, *, value: float = 0) -> Array:
    """(T, ...) -> (number, size, ...): the fewest chunks of at most ``chunk_tokens``, as equal as can be, padded."""
    chunk_tokens = integer(chunk_tokens, "chunk_tokens", ConfigError, at_least=1)
    number = max(1, -(-len(rows) // chunk_tokens))
    size = -(-len(rows) // number)
    width = [(0, number * size - len(rows))] + [(0, 0)] * (rows.ndim - 1)
    return jnp.pad(rows, width, constant_values=value).reshape(number, size, *rows.shape[1:])
