"""Exchange of states, their composing maps and convolution halos between spans, as operators that trace."""


# n local spans in storage order, B batch, C channels, T local tokens.

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ringspan.core.recurrence.spans import Loan
from ringspan.torch.engine.recurrence.current import (
    SequencePart,
    SequencePass,
    next_call,
)
from ringspan.torch.engine.recurrence.plan import Plan, from_text
from ringspan.torch.engine.transport.agreement import agree, one_at_a_time
from ringspan.torch.engine.transport.exchange import TensorSpec
from ringspan.torch.engine.transport.protocol import Transport, transport_of


@dataclass(frozen=True)
class Entry:
    """One call's state after each part of a sequence, equal on all ranks, with its gradient on its way back.

    ``width``: numbers of its last dimension, one for each input of a convolution; 1 for any other state.
    """

    part: SequencePart
    call: Hashable
    plan: Plan
    group: dist.ProcessGroup | None
    width: int = 1

    @classmethod
    def of(cls, plan: Plan, sequences: SequencePass, width: int = 1) -> "Entry | None":
        return (
            None
            if sequences.part is None
            else cls(sequences.part, next_call(), plan, sequences.group, width)
        )

    def read(self) -> Tensor | None:
        """Return the state that the part begins with, zero for inputs of another document; None in the first part."""
        state = self.part.read_state(self.call)
        return None if state is None else self._seen(state)

    def write(self, state: Tensor) -> None:
        if self.part.keeps_state():
            self.part.write_state(self.call, self._summed(state))

    def read_gradient(self) -> Tensor | None:
        return self.part.read_gradient(self.call)

    def write_gradient(self, gradient: Tensor) -> None:
        if self.part.number:
            self.part.write_gradient(self.call, self._seen(self._summed(gradient)))

    def _summed(self, part: Tensor) -> Tensor:
        total = part.detach().clone(memory_format=torch.contiguous_format)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def _seen(self, state: Tensor) -> Tensor:
        first = self.plan.places[0].start
        before = [
            first - starts[bisect_right(starts, first) - 1]
            for starts in self.plan.starts
        ]
        last = torch.arange(self.width, 0, -1)  # each entry's distance from the part
        seen = torch.stack([last <= count for count in before]).view(
            -1, *[1] * (state.ndim - 2), self.width
        )
        return state * seen.to(state)


def applied(maps: Tensor, states: Tensor, is_matrix: bool) -> Tensor:
    """Compute ``A S``, where A is a matrix (..., K, K) or has factors of S's entries."""
    return maps @ states if is_matrix else maps * states


@torch.library.custom_op("ringspan::scan_states", mutates_args=())
def scan_states(
    maps: Tensor, states: Tensor, plan: str, is_matrix: bool, reverse: bool
) -> Tensor:
    """Return each local span's incoming state, composed of earlier spans' maps ``A_j S + B_j``; 0 if none."""
    # maps (n, B, ...) are A and states (n, B, ...) B. In ``reverse`` the spans come from the last one on, A is
    # transposed and a span takes the gradient of the state after it.
    plan_, group, rank = _read(plan)
    facts = {
        "states": tuple(states.shape[1:]),
        "maps": tuple(maps.shape[1:]),
        "dtype": str(states.dtype),
        "spans": plan,
        "direction": "backward" if reverse else "forward",
    }
    with one_at_a_time(group), torch.autocast(states.device.type, enabled=False):
        agree(group, facts)
        transport = transport_of(group, f"scan {facts}")
        return scan(
            maps, states, plan_, rank, transport, is_matrix=is_matrix, reverse=reverse
        )


@scan_states.register_fake
def _(maps: Tensor, states: Tensor, *_: object) -> Tensor:
    return torch.empty_like(states, memory_format=torch.contiguous_format)


def scan(
    maps: Tensor,
    states: Tensor,
    plan: Plan,
    rank: int,
    transport: Transport,
    *,
    is_matrix: bool,
    reverse: bool,
) -> Tensor:
    """Compute ``scan_states`` on one rank: in each round, send prefixes of spans and compose those that arrive.

    A prefix is the map ``S -> A S + B`` of some spans up to one. Composing applies the later map to the earlier one:
    ``A_2 (A_1 S + B_1) + B_2``. Returned are the states (n, B, ...) that local spans begin with; in ``reverse``,
    gradients of the states that they end with.
    """
    mine = plan.mine(rank)
    if reverse and is_matrix:
        maps = maps.mT
    prefixes = _Prefixes(maps, states, mine, is_matrix=is_matrix)
    for number, messages in enumerate(plan.reverse_rounds if reverse else plan.rounds):
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, TensorSpec]] = []
        arrivals: list[tuple[Any, list[Tensor] | None, int]] = []
        for message in messages:
            source, target = _ends_of(message, plan, reverse=reverse)
            sender, receiver = plan.places[source].rank, plan.places[target].rank
            parts = None
            if sender == rank:
                parts = prefixes.parts_of(source, has_map=message.has_map)
                if receiver != rank:
                    sends += [(receiver, part) for part in parts]
            if receiver == rank:
                arrivals.append((message, parts, target))
                if parts is None:
                    specs = prefixes.specs(has_map=message.has_map)
                    receives += [(sender, spec) for spec in specs]
        transfer, pending = transport.post(sends, receives, 2 * number + reverse)
        transfer.wait()
        received = iter(pending)
        # Composed after the transfer, since the prefixes sent are from before this round.
        for message, parts, target in arrivals:
            if parts is None:
                parts = [next(received).read() for _ in range(1 + message.has_map)]
            prefixes.take(message, target, parts)
    return prefixes.stacked()


def _ends_of(message: Any, plan: Plan, *, reverse: bool) -> tuple[int, int]:
    """Return the spans that a message comes from and goes to; in ``reverse`` they are counted from the last one."""
    if not reverse:
        return message.source, message.target
    last = len(plan.places) - 1
    return last - message.source, last - message.target


class _Prefixes:
    """Prefixes of local spans as they grow, and the states that have arrived for spans to begin with."""

    def __init__(
        self, maps: Tensor, states: Tensor, mine: Sequence[int], *, is_matrix: bool
    ) -> None:
        """Begin with each span's own map, its A in ``maps`` and its B in ``states``."""
        self._mine, self._is_matrix, self._like = mine, is_matrix, (states[0], maps[0])
        self._maps = {number: maps[index] for index, number in enumerate(mine)}
        self._prefixes = {number: states[index] for index, number in enumerate(mine)}
        self._taken: dict[int, Tensor] = {}

    def parts_of(self, source: int, *, has_map: bool) -> list[Tensor]:
        """Return what a message holds of a span's prefix: its B, and its A if the receiver needs it."""
        parts = [self._prefixes[source]] + ([self._maps[source]] if has_map else [])
        return [part.contiguous() for part in parts]

    def specs(self, *, has_map: bool) -> list[TensorSpec]:
        return [TensorSpec.like(part) for part in self._like[: 1 + has_map]]

    def take(self, message: Any, target: int, parts: list[Tensor]) -> None:
        """Let a span begin with an arrived state, or compose its own prefix with the arrived one, or both."""
        taken, prefixes, is_matrix = self._taken, self._prefixes, self._is_matrix
        if message.is_state:
            taken[target] = (
                taken[target] + parts[0] if target in taken else parts[0].clone()
            )
        if message.composes:
            own = self._maps[target]
            prefixes[target] = applied(own, parts[0], is_matrix) + prefixes[target]
            # The map of a complete prefix is needed again only to add another branch's gradient.
            if message.has_map:
                self._maps[target] = applied(own, parts[1], is_matrix)

    def stacked(self) -> Tensor:
        """Return the states that local spans begin with, zero for those that begin a document."""
        return torch.stack(
            [
                self._taken[number]
                if number in self._taken
                else torch.zeros_like(self._like[0])
                for number in self._mine
            ]
        )


@torch.library.custom_op("ringspan::halo", mutates_args=())
def halo_of(x: Tensor, width: int, plan: str) -> Tensor:
    """Return the ``width`` inputs before each local span, 0 if not needed: (B, C, T) -> (n, B, C, width)."""
    return _lent(x, x.shape[-1], width, plan, reverse=False)


@torch.library.custom_op("ringspan::halo_backward", mutates_args=())
def halo_backward(dhalo: Tensor, width: int, tokens: int, plan: str) -> Tensor:
    """Return the gradients of inputs from the halos': (n, B, C, width) -> (B, C, tokens)."""
    return _lent(dhalo, tokens, width, plan, reverse=True)


@halo_of.register_fake
def _(x: Tensor, width: int, plan: str) -> Tensor:
    plan_, _, rank = _read(plan)
    return x.new_empty((len(plan_.mine(rank)), *x.shape[:-1], width))


@halo_backward.register_fake
def _(dhalo: Tensor, width: int, tokens: int, plan: str) -> Tensor:
    return dhalo.new_empty((*dhalo.shape[1:-1], tokens))


def _lent(x: Tensor, tokens: int, width: int, plan: str, *, reverse: bool) -> Tensor:
    plan_, group, rank = _read(plan)
    facts = {
        "inputs": tuple(x.shape[:-1] if not reverse else x.shape[1:-1]),
        "taps": width + 1,
        "dtype": str(x.dtype),
        "spans": plan,
        "direction": "backward" if reverse else "forward",
    }
    with one_at_a_time(group):
        agree(group, facts)
        transport = transport_of(group, f"halo {facts}")
        return lend(x, tokens, width, plan_, rank, transport, reverse=reverse)


def lend(
    x: Tensor,
    tokens: int,
    width: int,
    plan: Plan,
    rank: int,
    transport: Transport,
    *,
    reverse: bool,
) -> Tensor:
    """Run ``halo_of``, or ``halo_backward`` in reverse, over a transport."""
    mine = plan.mine(rank)
    index = {number: i for i, number in enumerate(mine)}
    shape = (*x.shape[1:-1], tokens) if reverse else (len(mine), *x.shape[:-1], width)
    made = x.new_zeros(shape)
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, TensorSpec]] = []
    arrivals: list[tuple[Tensor, Tensor | None]] = []

    def inputs(of: Tensor, loan: Loan) -> Tensor:
        first = plan.places[loan.source].offset + loan.offset
        return of[..., first : first + loan.tokens]

    def borrowed(of: Tensor, loan: Loan) -> Tensor:
        return of[index[loan.target]][..., loan.place : loan.place + loan.tokens]

    for loan in plan.loans(width):
        lender, borrower = plan.places[loan.source].rank, plan.places[loan.target].rank
        sender, receiver = (borrower, lender) if reverse else (lender, borrower)
        part = None
        if sender == rank:
            part = (borrowed if reverse else inputs)(x, loan).contiguous()
            if receiver != rank:
                sends.append((receiver, part))
        if receiver == rank:
            place = (inputs if reverse else borrowed)(made, loan)
            arrivals.append((place, part))
            if part is None:
                receives.append(
                    (sender, TensorSpec(tuple(place.shape), x.dtype, x.device))
                )
    transfer, pending = transport.post(sends, receives, int(reverse))
    transfer.wait()
    received = iter(pending)
    for place, part in arrivals:
        # An input may be in several halos, so gradients add up.
        place += next(received).read() if part is None else part
    return made


def _read(text: str) -> tuple[Plan, dist.ProcessGroup | None, int]:
    """Return a plan, its group and this rank in it."""
    plan, name = from_text(text)
    group = c10d._resolve_process_group(name) if name else None  # pyright: ignore
    return plan, group, dist.get_rank(group) if group is not None else 0
