"""KL divergence of an index from the attention that it is to predict (DeepSeek-V3.2), on one device, in chunks.

    KL = sum_s p_s (log p_s - log softmax(I)_s),   p_s = sum_h a_hs / sum_hs a_hs

over the keys s of each query: a_hs are the probabilities of its heads, I_s the scores of the index.
Source: DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.torch.mechanisms.chosen_keys.chosen import (
    IndexInputs,
    Visible,
    in_chunks,
    probabilities,
    scored,
)


class Attention(NamedTuple):
    """Attention that an index learns, from q (B, H, T, D) to columns (B, T, k) of keys (B, n, C); lse (B, H, T)."""

    q: Tensor
    keys: Tensor
    columns: Tensor | Visible
    scale: float
    lse: Tensor


class _Chunk(NamedTuple):
    """A chunk of queries, and the two distributions over their keys that are compared."""

    row: int
    rows: slice
    columns: Tensor
    """Columns (c, k); -1 for none, and of padding."""
    target: Tensor
    """p (c, k)."""
    log_softmax: Tensor
    """Log-probabilities (c, k) of the index's scores; 0 where there is no key."""
    products: Tensor
    """``relu(scale q_h k)``, (c, H, k)."""
    keys: Tensor
    """Index keys (c, k, D)."""


def divergence(index: IndexInputs, attention: Attention) -> Tensor:
    """Return the sum over real queries, in lse's dtype."""
    total = attention.lse.new_zeros(())
    for part in _compared(index, attention):
        total += (
            torch.xlogy(part.target, part.target) - part.target * part.log_softmax
        ).sum()
    return total


def divergence_backward(
    factor: Tensor, index: IndexInputs, attention: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, keys (in lse's dtype) and weights of the index, for a gradient of the sum."""
    dtype = attention.lse.dtype
    dq, dweights = torch.zeros_like(index.q), torch.zeros_like(index.weights)
    dkeys = index.k.new_zeros(index.k.shape, dtype=dtype)
    for row, rows, columns, target, log_softmax, products, keys in _compared(
        index, attention
    ):
        ds = (
            log_softmax.exp()
            .mul_(target.sum(-1, keepdim=True))
            .sub_(target)
            .mul_(factor)
        )
        ds.masked_fill_(columns < 0, 0)
        dweights[row, rows] = (products @ ds[..., None])[..., 0].to(dweights.dtype)
        dproducts = (
            ds[:, None]
            * index.weights[row, rows, :, None]
            * (products > 0)
            * index.scale
        )
        dq[row, rows] = (dproducts @ keys).to(dq.dtype)
        dchosen = dproducts.mT @ index.q[row, rows].to(dtype)
        dkeys[row].index_add_(0, columns.clamp(min=0).flatten(), dchosen.flatten(0, 1))
    return dq, dkeys, dweights


def _compared(index: IndexInputs, attention: Attention) -> Iterator[_Chunk]:
    """Yield chunks of queries with both distributions: attention's p and the log-softmax of the index's scores.

    Queries of padding have no keys, so that they add nothing to the sum.
    """
    (q, keys, columns, scale, lse), real = attention, index.real
    assert real is not None, "it learns"
    for row, rows, all_ in in_chunks(columns, keys):
        here = all_.masked_fill(~real[row, rows, None], -1)
        scores, _ = scored(q[row, :, rows], keys[row], here, scale, lse.dtype)
        target = probabilities(scores, lse[row, :, rows].T).sum(1)
        target /= target.sum(-1, keepdim=True).clamp(min=torch.finfo(lse.dtype).tiny)
        products, chosen = scored(
            index.q[row, rows].transpose(0, 1),
            index.k[row],
            here,
            index.scale,
            lse.dtype,
        )
        products.relu_()
        of_index = (index.weights[row, rows, None].to(lse.dtype) @ products)[:, 0]
        none = here < 0
        log_softmax = (
            of_index.masked_fill_(none, -torch.inf).log_softmax(-1).masked_fill(none, 0)
        )
        yield _Chunk(
            row, rows, here, target, log_softmax, products, chosen.to(lse.dtype)
        )
