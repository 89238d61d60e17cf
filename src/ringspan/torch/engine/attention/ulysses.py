"""Exchange of tokens for heads within a group of U members: each gets all tokens of its own heads.

DeepSpeed Ulysses (Jacobs et al. 2023); with a ring between groups USP (Fang and Zhao 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.layout import Layout
from ringspan.core.schedule.route import Heads
from ringspan.torch.engine.attention import ring as rings
from ringspan.torch.engine.attention.part import (
    Ring,
    accumulation_dtype,
    empty_like,
    result_for,
)
from ringspan.torch.engine.transport.exchange import TensorSpec
from ringspan.torch.engine.transport.protocol import Transport

_TO_HEADS, _TO_TOKENS = 0, 1  # message numbers


_Pieces = tuple[Tensor, ...]


class _Trade(NamedTuple):
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
        """Run ``ring.forward`` on this member's heads; results (B, H, T, ...) of its tokens."""
        q_, k_, v_ = self._to_heads(self._queries(q), self._keys(k), self._keys(v))
        out, lse = rings.forward(
            ring, q_, k_, v_, None if sinks is None else sinks[self.mine.queries]
        )
        # out and lse are traded together: one round of messages, not two.
        back = (
            self._queries(result_for(q, v)),
            self._queries(lse.new_empty((*q.shape[:-1], 1))),
        )
        self._to_tokens((out, lse.unsqueeze(-1)), back)
        return back[0].tensor, back[1].tensor.squeeze(-1)

    def backward(
        self,
        ring: Ring,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run ``ring.backward`` on this member's heads, trading forward's inputs again."""
        queries = [self._queries(x) for x in (dout, q, out, lse.unsqueeze(-1))]
        dout_, q_, out_, lse_, k_, v_ = self._to_heads(
            *queries, self._keys(k), self._keys(v)
        )
        is_shared = len({share.keys.start for share in self.shares}) < len(self.shares)
        # Gradients of a head that several members share are summed before they are rounded.
        kv_dtype = accumulation_dtype(k.dtype) if is_shared else None
        gradients = rings.backward(
            ring, dout_, q_, k_, v_, out_, lse_.squeeze(-1), kv_dtype=kv_dtype
        )
        del dout_, q_, out_, lse_, k_, v_  # before as much is sent back
        back = (
            self._queries(empty_like(q)),
            self._keys(empty_like(k)),
            self._keys(empty_like(v)),
        )
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
        """Trade (B, heads, T, size) of local tokens for (B, my heads, U T, size)."""
        mine = [tensor[:, heads[self.member]] for tensor, heads, _ in trades]
        received = self._trade(
            {
                other: [(tensor[:, heads[other]],) for tensor, heads, _ in trades]
                for other in self._others()
            },
            {
                other: [TensorSpec.like(part) for part in mine]
                for other in self._others()
            },
            _TO_HEADS,
        )
        results: list[Tensor] = []
        for number, (part, (_, _, layout)) in enumerate(zip(mine, trades, strict=True)):
            batch, num_heads, _, size = part.shape
            results.append(
                part.new_empty(batch, num_heads, layout.tokens_per_rank, size)
            )
            for member, parts in {self.member: mine, **received}.items():
                _place(results[-1], parts[number], layout.places(member))
        return results

    def _trade(
        self,
        sends: dict[int, list[_Pieces]],
        receives: dict[int, list[TensorSpec]],
        message: int,
    ) -> dict[int, list[Tensor]]:
        """Send and receive tensors, one message per member: NCCL starts few at once."""
        packed = [(member, _packed(parts)) for member, parts in sends.items()]
        expected = [
            (
                member,
                TensorSpec(
                    (sum(spec.nbytes for spec in specs),), torch.uint8, specs[0].device
                ),
            )
            for member, specs in receives.items()
        ]
        transfer, pending = self.exchange.post(packed, expected, message)
        transfer.wait()
        return {
            member: _unpacked(receive.read(), receives[member])
            for (member, _), receive in zip(expected, pending, strict=True)
        }

    def _to_tokens(self, tensors: Sequence[Tensor], into: Sequence[_Trade]) -> None:
        """Trade (B, my heads, U T, size) back for (B, heads, T, size); sum shared heads."""
        both = [*zip(tensors, into, strict=True)]
        sends = {
            other: [
                _pieces(tensor, layout.places(other)) for tensor, (_, _, layout) in both
            ]
            for other in self._others()
        }
        receives = {
            other: [
                TensorSpec(
                    tuple(result[:, heads[other]].shape), tensor.dtype, tensor.device
                )
                for tensor, (result, heads, _) in both
            ]
            for other in self._others()
        }
        received = self._trade(sends, receives, _TO_TOKENS)
        for number, (tensor, (result, heads, layout)) in enumerate(both):
            parts = {member: some[number] for member, some in received.items()}
            parts[self.member] = torch.cat(
                _pieces(tensor, layout.places(self.member)), dim=2
            )
            # In the order of members on every rank, so that sums round equally and runs repeat to the bit.
            for member in sorted(parts):
                sharing = [
                    parts[other]
                    for other in sorted(parts)
                    if heads[other] == heads[member]
                ]
                if heads.index(heads[member]) == member:
                    result[:, heads[member]] = (
                        sharing[0] if len(sharing) == 1 else torch.stack(sharing).sum(0)
                    )


def _packed(parts: Sequence[_Pieces]) -> Tensor:
    specs = [_spec(pieces) for pieces in parts]
    buffer = parts[0][0].new_empty(
        sum(spec.nbytes for spec in specs), dtype=torch.uint8
    )
    for pieces, there in zip(parts, _unpacked(buffer, specs), strict=True):
        torch.cat(list(pieces), dim=2, out=there)
    return buffer


def _spec(pieces: _Pieces) -> TensorSpec:
    batch, heads, _, size = pieces[0].shape
    tokens = sum(piece.shape[2] for piece in pieces)
    return TensorSpec((batch, heads, tokens, size), pieces[0].dtype, pieces[0].device)


def _unpacked(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the tensors in a buffer; the widest dtypes come first, so that all are aligned."""
    found: dict[int, Tensor] = {}
    start = 0
    for number in sorted(
        range(len(specs)), key=lambda number: -specs[number].dtype.itemsize
    ):
        stop = start + specs[number].nbytes
        found[number], start = specs[number].on(buffer[start:stop]), stop
    return [found[number] for number in range(len(specs))]


def _place(group: Tensor, part: Tensor, places: Sequence[slice]) -> None:
    each = part.shape[2] // len(places)
    for number, place in enumerate(places):
        group[:, :, place] = part[:, :, number * each : (number + 1) * each]


def _pieces(group: Tensor, places: Sequence[slice]) -> _Pieces:
    return tuple(group[:, :, place] for place in places)
