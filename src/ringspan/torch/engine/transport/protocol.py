"""Interface between ring and transport, registry (``Exchange`` by default), and a transport without processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import torch.distributed as dist
from torch import Tensor

from ringspan.torch.engine.transport.exchange import (
    Exchange,
    PendingReceive,
    TensorSpec,
    Transfer,
    note_post,
)


class Transport(Protocol):
    """Point-to-point messages of one rank during one pass. Peers are numbered from 0 on."""

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, TensorSpec | Tensor]],
        message: int,
    ) -> tuple[Transfer, list[PendingReceive]]:
        """Start all sends (to, buffer) and receives (from, spec) of the message with this number, without waiting.

        A receive may name the tensor into which it goes. Between one pair of ranks the order of sends is the order of
        receives. Buffers are contiguous, and stay as they are until the transfer was waited for.
        """
        ...

    def empty(self, spec: TensorSpec) -> Tensor:
        """Allocate a message that is to be sent once."""
        ...

    def among(self, ranks: Sequence[int], name: str) -> "Transport":
        """Return the same pass between some ranks, as peers 0, 1, ..., apart from other messages."""
        ...


_registered: Final[
    dict[str, Callable[[str], Transport]]
] = {}  # keys are names of process groups


def transport_of(group: dist.ProcessGroup | None, signature: str) -> Transport:
    make = _registered.get(group.group_name) if group is not None else None
    return make(signature) if make else Exchange(group, signature)


@contextmanager
def transport_registered(
    group: dist.ProcessGroup, make: Callable[[str], Transport]
) -> Iterator[None]:
    """Use ``make(signature)`` for passes over a group, found by its name, while active."""
    before = dict(_registered)
    _registered[group.group_name] = make
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)


MessageKey = tuple[str, int]
"""Part of a pass (see ``Transport.among``) and message number."""


class Network(Protocol):
    def send(self, to: int, message: Tensor, key: MessageKey) -> None:
        """Take a message, which stays unchanged only until its transfer has been waited for."""
        ...

    def receive(
        self, pending: Sequence[PendingReceive], key: MessageKey
    ) -> Callable[[], None] | None:
        """Start to fill one post's messages; return a call that waits for them, or None."""
        ...


class Nobody:
    """A network that drops every message: receive buffers keep their content. ``seen`` is called with each message."""

    def __init__(self, seen: Callable[[Tensor], None] | None = None) -> None:
        self.seen = seen

    def send(self, to: int, message: Tensor, key: MessageKey) -> None:
        if self.seen is not None:
            self.seen(message)

    def receive(
        self, pending: Sequence[PendingReceive], key: MessageKey
    ) -> Callable[[], None] | None:
        if self.seen is not None:
            for each in pending:
                self.seen(each.read())


class FakeTransport:
    """One rank's messages to and from a network; they count like real ones."""

    def __init__(
        self, network: Network, name: str = "", ranks: Sequence[int] | None = None
    ) -> None:
        """Choose the numbering of peers: by network rank, or by index into ``ranks``."""
        self._network, self._name, self._ranks = network, name, ranks

    def among(self, ranks: Sequence[int], name: str) -> "FakeTransport":
        return FakeTransport(self._network, f"{self._name} {name}", ranks)

    def empty(self, spec: TensorSpec) -> Tensor:
        return spec.empty()

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, TensorSpec | Tensor]],
        message: int,
    ) -> tuple[Transfer, list[PendingReceive]]:
        """Hand all receives and sends of a message number to the network; only ``wait`` blocks."""
        key = self._name, message
        pending = [
            PendingReceive.of(self._rank(peer), asked) for peer, asked in receives
        ]
        wait = self._network.receive(pending, key) if pending else None
        sends = [(self._rank(peer), buffer) for peer, buffer in sends]
        for rank, buffer in sends:
            assert buffer.is_contiguous(), "messages are contiguous"
            self._network.send(rank, buffer, key)
        return Transfer(
            (),
            [buffer for _, buffer in sends],
            note_post(sends, receives, message),
            wait,
        ), pending

    def _rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]
