"""The merge rule: two partials of the same queries over disjoint keys give the partial over both sets, exactly.

A partial is ``out = softmax(scores) v`` with ``lse = log sum exp(scores)`` (natural log). A row with no key has out 0
and lse -inf; merging two such rows gives 0 and -inf, never NaN.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Return ``lse = log(e^lse_a + e^lse_b)``, ``out = w out_b + (1 - w) out_a``, ``w = sigmoid(lse_b - lse_a)``.

    Out (..., T, D), lse (..., T). Source: Milakov & Gimelshein 2018; FlashAttention (Dao et al. 2022), section 3.
    """
    lse = np.logaddexp(lse_a, lse_b)
    both_empty = np.isneginf(lse)
    weight = np.exp(np.where(both_empty, 0.0, lse_b - np.where(both_empty, 0.0, lse)))
    weight = np.where(both_empty, 0.0, weight)[..., None]
    return out_a + weight * (out_b - out_a), lse
