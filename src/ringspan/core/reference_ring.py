"""Ring Attention, forward and backward, as a loop over hops in numpy: read this first.

The ranks of a ring are the entries of lists here, and a message is an entry that moves to the next place. Each rank
keeps its queries. Keys and values travel: while a rank computes with the block that it holds, it sends that block to
the next rank and receives one from the rank before. After one hop for each rank, every query has met every key.

``ringspan.torch.engine.attention.ring`` is this loop with real messages, blocks that a mask makes useless left out, and
kernels; ``core/schedule/schedule.py`` says which blocks those are. Source: Liu et al. 2023, algorithm 1.
"""

# B batch, H heads, T tokens of a rank, D head size, E value head size; lists have an entry for each rank.

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ringspan.core.reference import Array, Gradients, attention, merge

Positions = NDArray[np.int64]
Allowed = Callable[[Positions, Positions], NDArray[np.bool_]]


def causal(queries: Positions, keys: Positions) -> NDArray[np.bool_]:
    """Mark the keys that each query sees, (Q, K): those at its own position and before."""
    return queries[:, None] >= keys


def forward(
    q: list[Array],
    k: list[Array],
    v: list[Array],
    positions: list[Positions],
    scale: float,
    allowed: Allowed = causal,
) -> tuple[list[Array], list[Array]]:
    """Return each rank's attention to the keys of all ranks, and its log-sum-exp.

    Shapes: q and k (B, H, T, D), v (B, H, T, E), positions (T,) -> out (B, H, T, E), lse (B, H, T).
    """
    ranks = range(len(q))
    out = [np.zeros((*q[rank].shape[:3], v[rank].shape[3])) for rank in ranks]
    lse = [np.full(q[rank].shape[:3], -np.inf) for rank in ranks]
    held = list(zip(k, v, positions, strict=True))
    for _hop in ranks:
        for rank in ranks:  # all at once, on devices of their own
            keys, values, places = held[rank]
            partial = attention(
                q[rank], keys, values, allowed(positions[rank], places), scale
            )
            out[rank], lse[rank] = merge(out[rank], lse[rank], *partial)
        held = [held[rank - 1] for rank in ranks]
    return out, lse


def backward(
    dout: list[Array], out: list[Array], lse: list[Array], q: list[Array], k: list[Array], v: list[Array],
    positions: list[Positions], scale: float, allowed: Allowed = causal,
) -> list[Gradients]:  # fmt: skip
    """Return each rank's gradients of ``sum(dout * out)`` over all ranks, from what ``forward`` returned.

    The gradients of keys and values travel with their block and collect what every rank adds; the last hop brings them
    back to the rank that owns the block.
    """
    ranks = range(len(q))
    dq = [np.zeros_like(x) for x in q]
    held = [
        (
            k[rank],
            v[rank],
            positions[rank],
            np.zeros_like(k[rank]),
            np.zeros_like(v[rank]),
        )
        for rank in ranks
    ]
    for _hop in ranks:
        for rank in ranks:
            keys, values, places, dk, dv = held[rank]
            scores = scale * q[rank] @ keys.swapaxes(-1, -2)
            seen = allowed(positions[rank], places)
            p = np.exp(np.where(seen, scores - lse[rank][..., None], -np.inf))
            delta = (dout[rank] * out[rank]).sum(-1, keepdims=True)
            ds = scale * p * (dout[rank] @ values.swapaxes(-1, -2) - delta)
            dq[rank] += ds @ keys
            dk += ds.swapaxes(-1, -2) @ q[rank]
            dv += p.swapaxes(-1, -2) @ dout[rank]
        held = [held[rank - 1] for rank in ranks]
    return [Gradients(dq[rank], held[rank][3], held[rank][4]) for rank in ranks]
