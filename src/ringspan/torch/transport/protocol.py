"""Interface between ring and transport, and registry: ``Exchange`` by default."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import torch.distributed as dist
from torch import Tensor

from ringspan.torch.transport.exchange import Exchange, PendingReceive, TensorSpec, Transfer


class Transport(Protocol):
    """Point-to-point messages of one rank during one pass. Peers are numbered from 0 on."""

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, TensorSpec]], message: int
    ) -> tuple[Transfer, list[PendingReceive]]:
        """Start all sends (to, buffer) and receives (from, spec) of the message with this number, without waiting.

        Between one pair of ranks the order of sends is the order of receives. Buffers are contiguous, and stay as they
        are until the transfer was waited for.
        """
        ...

    def empty(self, spec: TensorSpec) -> Tensor:
        """Allocate a message that is to be sent once."""
        ...

    def among(self, ranks: Sequence[int], name: str) -> "Transport":
        """Return the same pass between some ranks, as peers 0, 1, ..., apart from other messages."""
        ...


_registered: Final[dict[str, Callable[[str], Transport]]] = {}  # by the name of a process group


def transport_of(group: dist.ProcessGroup | None, signature: str) -> Transport:
    make = _registered.get(group.group_name) if group is not None else None
    return make(signature) if make else Exchange(group, signature)


@contextmanager
def transport_registered(group: dist.ProcessGroup, make: Callable[[str], Transport]) -> Iterator[None]:
    """Use ``make(signature)`` for passes over a group, found by its name, while active."""
    before = dict(_registered)
    _registered[group.group_name] = make
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)
