"""Exchange of tokens for heads within a group, so that each rank has all of the group's tokens of its own heads.

DeepSpeed Ulysses (Jacobs et al. 2023); with a ring between groups USP (Fang and Zhao 2024).
U members a group, B batch, H query heads, G key/value heads, T local tokens, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.schedule.route import Heads
from ringspan.torch.attention import ring as rings
from ringspan.torch.attention.ring import Ring
from ringspan.torch.transport.exchange import TensorSpec
from ringspan.torch.transport.protocol import Transport

_TO_HEADS, _TO_TOKENS = 0, 1  # message numbers


class _Trade(NamedTuple):
    """A tensor (B, heads, tokens, size), each member's heads of it, and the layout of its tokens."""

    tensor: Tensor
    heads: Sequence[slice]
    layout: Layout


@dataclass(frozen=True)
class Ulysses:
    """One member's side of the trade; ``layout`` and ``key_layout`` are the groups' (``Layout.grouped``)."""

    member: int
    shares: tuple[Heads, ...]
    layout: Layout
    key_layout: Layout
    exchange: Transport

    @property
    def mine(self) -> Heads:
        return self.shares[self.member]

    def forward(
        self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run ``ring.forward`` on this member's heads; results as they came, (B, H, T, ...)."""
        q_, k_, v_ = self._to_heads(self._queries(q), self._keys(k), self._keys(v))
        out, lse = rings.forward(ring, q_, k_, v_, None if sinks is None else sinks[self.mine.queries])
        # out and lse are traded together: one round of messages, not two.
        back = self._queries(rings.empty_like(q, v.shape[-1])), self._queries(lse.new_empty((*q.shape[:-1], 1)))
        self._to_tokens((out, lse.unsqueeze(-1)), back)
        return back[0].tensor, back[1].tensor.squeeze(-1)

    def backward(
        self, ring: Ring, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run ``ring.backward`` on this member's heads, trading forward's inputs again rather than keeping them."""
        queries = [self._queries(x) for x in (dout, q, out, lse.unsqueeze(-1))]
        dout_, q_, out_, lse_, k_, v_ = self._to_heads(*queries, self._keys(k), self._keys(v))
        is_shared = len({share.keys.start for share in self.shares}) < len(self.shares)
        kv_dtype = (
            rings.accumulation_dtype(k.dtype) if is_shared else None
        )  # several members' parts are still to be summed
        gradients = rings.backward(ring, dout_, q_, k_, v_, out_, lse_.squeeze(-1), kv_dtype=kv_dtype)
        del dout_, q_, out_, lse_, k_, v_  # before as much is sent back
        back = self._queries(rings.empty_like(q)), self._keys(rings.empty_like(k)), self._keys(rings.empty_like(v))
        self._to_tokens(gradients, back)
        dq, dk, dv = (trade.tensor for trade in back)
        return dq, dk, dv

    def _queries(self, tensor: Tensor) -> _Trade:
        return _Trade(tensor, [share.queries for share in self.shares], self.layout)

    def _keys(self, tensor: Tensor) -> _Trade:
        return _Trade(tensor, [share.keys for share in self.shares], self.key_layout)

    def _others(self) -> list[int]:
        return [member for member in range(len(self.shares)) if member != self.member]

    def _to_heads(self, *trades: _Trade) -> list[Tensor]:
        """Trade (B, heads, T, size) of local tokens for (B, my heads, U T, size) of the group's."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, TensorSpec]] = []
        results: list[Tensor] = []
        for tensor, heads, layout in trades:
            mine = tensor[:, heads[self.member]]
            batch, num_heads, _, size = mine.shape
            result = tensor.new_empty(batch, num_heads, layout.tokens_per_rank, size)
            _place(result, mine, layout.places(self.member))
            results.append(result)
            for other in self._others():
                # A message is one stretch of memory; heads of (B, H, T, D) are not, with more than one sequence.
                sends.append((other, tensor[:, heads[other]].contiguous()))
                receives.append((other, TensorSpec.like(mine)))
        arrived = self._trade(sends, receives, _TO_HEADS)
        for result, (_, _, layout) in zip(results, trades, strict=True):
            for _ in self._others():
                member, part = next(arrived)
                _place(result, part, layout.places(member))
        return results

    def _trade(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, TensorSpec]], message: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each received tensor with its sender."""
        transfer, pending = self.exchange.post(sends, receives, message)
        transfer.wait()
        for (member, _), receive in zip(receives, pending, strict=True):
            yield member, receive.read()

    def _to_tokens(self, tensors: Sequence[Tensor], into: Sequence[_Trade]) -> None:
        """Trade (B, my heads, U T, size) back for (B, heads, T, size); sum shared heads in the dtype of ``tensors``."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, TensorSpec]] = []
        for tensor, (result, heads, layout) in zip(tensors, into, strict=True):
            for other in self._others():
                sends.append((other, _take(tensor, layout.places(other))))
                shape = tuple(result[:, heads[other]].shape)
                receives.append((other, TensorSpec(shape, tensor.dtype, tensor.device)))
        arrived = self._trade(sends, receives, _TO_TOKENS)
        for tensor, (result, heads, layout) in zip(tensors, into, strict=True):
            parts = {self.member: _take(tensor, layout.places(self.member))}
            parts |= dict(next(arrived) for _ in self._others())
            # In the order of members on every rank, so that sums round alike and runs repeat to the bit.
            for member in sorted(parts):
                sharing = [parts[other] for other in sorted(parts) if heads[other] == heads[member]]
                if heads.index(heads[member]) == member:
                    result[:, heads[member]] = sharing[0] if len(sharing) == 1 else torch.stack(sharing).sum(0)


def _place(group: Tensor, part: Tensor, places: Sequence[slice]) -> None:
    """Write one member's tokens to their places in its group's storage."""
    each = part.shape[2] // len(places)
    for number, place in enumerate(places):
        group[:, :, place] = part[:, :, number * each : (number + 1) * each]


def _take(group: Tensor, places: Sequence[slice]) -> Tensor:
    """Return one member's tokens from its group's storage, contiguous."""
    return torch.cat([group[:, :, place] for place in places], dim=2).contiguous()
