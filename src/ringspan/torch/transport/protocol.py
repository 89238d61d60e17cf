"""What a ring asks of a transport, and which one a process group has: ``Exchange``, or what was registered for it."""

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
        """An uninitialised tensor for a message that is to be sent once."""
        ...

    def among(self, ranks: Sequence[int], name: str) -> "Transport":
        """The same pass between some of the ranks, which are its peers 0, 1, ..., apart from other messages."""
        ...


_registered: Final[dict[str, Callable[[str], Transport]]] = {}  # by the name of a process group


def transport_of(group: dist.ProcessGroup | None, signature: str) -> Transport:
    """The transport of a pass that ``signature`` names, over a group."""
    make = _registered.get(group.group_name) if group is not None else None
    return make(signature) if make else Exchange(group, signature)


@contextmanager
def transport_registered(group: dist.ProcessGroup, make: Callable[[str], Transport]) -> Iterator[None]:
    """While this context is active, passes over a group go through what ``make`` gives for their signature.

    It is found by the group's name, as the operator finds the group itself.
    """
    before = dict(_registered)
    _registered[group.group_name] = make
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)
