"""Dense float64 attention, forward and backward: the oracle of every back end."""

# B batch, H query heads, G key/value heads (G divides H), Q queries, K keys, D head size, E value head size.

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Gradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array


def attention(
    q: Array, k: Array, v: Array, allowed: NDArray[np.bool_], scale: float, *, softcap: float = 0.0,
    bias: Array | None = None, sinks: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """``softmax(scale q k^T where allowed) v`` and its log-sum-exp; a row without keys gives 0 and -inf.

    ``softcap`` c turns a score s into ``c tanh(s / c)`` before ``bias``; ``sinks`` are logits with the value 0.
    Shapes: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E), allowed (Q, K), bias (H, Q, K), sinks (H,) -> out (B, H, Q,
    E), lse (B, H, Q).
    """
    scores = _scores(q, k, allowed, scale, softcap, bias)
    lse = _logsumexp(scores, sinks)
    probabilities = _probabilities(scores, lse)
    return probabilities @ _repeat(v, q), lse


def backward(
    dout: Array, q: Array, k: Array, v: Array, allowed: NDArray[np.bool_], scale: float, *, softcap: float = 0.0,
    bias: Array | None = None, sinks: Array | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of ``sum(dout * attention(q, k, v))``; dk and dv are summed over their query heads.

    With probabilities ``p`` and ``delta = sum(dout * out)``: ``dv = p^T dout``, ``ds = p (dout v^T - delta)``,
    ``dq = scale ds k``, ``dk = scale ds^T q`` (FlashAttention, appendix B.2).
    """
    k_heads, v_heads = _repeat(k, q), _repeat(v, q)
    scores = _scores(q, k, allowed, scale, softcap, bias)
    p = _probabilities(scores, _logsumexp(scores, sinks))
    dp = dout @ v_heads.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    if softcap:
        ds *= 1 - np.tanh(scale * (q @ k_heads.swapaxes(-1, -2)) / softcap) ** 2
    return Gradients(
        ds @ k_heads,
        _sum_groups(ds.swapaxes(-1, -2) @ q, k),
        _sum_groups(p.swapaxes(-1, -2) @ dout, v),
    )


def sink_gradient(dout: Array, out: Array, lse: Array, sinks: Array) -> Array:
    """Gradient of ``sum(dout * out)`` by the sinks (H,), whose share is ``exp(sink - lse)``."""
    base = np.where(np.isneginf(lse), 0.0, lse)
    return -(np.exp(sinks[:, None] - base) * (dout * out).sum(-1)).sum((0, 2))


def _repeat(kv: Array, q: Array) -> Array:
    return np.repeat(kv, q.shape[1] // kv.shape[1], axis=1)


def _sum_groups(per_head: Array, kv: Array) -> Array:
    batch, groups, tokens, size = kv.shape
    return per_head.reshape(batch, groups, -1, tokens, size).sum(2)


def _scores(
    q: Array,
    k: Array,
    allowed: NDArray[np.bool_],
    scale: float,
    softcap: float,
    bias: Array | None,
) -> Array:
    scores = scale * (q @ _repeat(k, q).swapaxes(-1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return np.where(allowed, scores, -np.inf)


def _logsumexp(scores: Array, sinks: Array | None) -> Array:
    """Return ``log(sum(exp(scores)))`` over keys, with a sink's logit as one more key; -inf without any.

    Scores (B, H, Q, K) and sinks (H,) -> (B, H, Q). The largest score is subtracted first, so that exp does not
    overflow.
    """
    if sinks is not None:
        column = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate((scores, column), axis=-1)
    top: Array = scores.max(-1, initial=-np.inf)
    finite = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scores - finite[..., None]).sum(-1)) + finite


def _probabilities(scores: Array, lse: Array) -> Array:
    """Return ``exp(scores - lse)``; 0 in a row without keys."""
    return np.exp(scores - np.where(np.isneginf(lse), 0.0, lse)[..., None])


def merge(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array
) -> tuple[Array, Array]:
    """Return ``lse = log(e^lse_a + e^lse_b)``, ``out = w out_b + (1 - w) out_a``, ``w = sigmoid(lse_b - lse_a)``.

    Partials of the same queries over disjoint keys give the partial over both, exactly: out (..., T, D) and lse
    (..., T). A row with no key has out 0 and lse -inf; two such rows give 0 and -inf, never NaN. Source: Milakov &
    Gimelshein 2018; FlashAttention (Dao et al. 2022), section 3.
    """
    lse = np.logaddexp(lse_a, lse_b)
    both_empty = np.isneginf(lse)
    weight = np.exp(np.where(both_empty, 0.0, lse_b - np.where(both_empty, 0.0, lse)))
    weight = np.where(both_empty, 0.0, weight)[..., None]
    return out_a + weight * (out_b - out_a), lse
