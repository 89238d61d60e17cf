"""A transport without processes, for traces, rehearsals, one-rank benchmarks and tests; a network plays the others."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ringspan.torch.transport.exchange import PendingReceive, TensorSpec, Transfer, note_post

MessageKey = tuple[str, int]
"""Part of a pass (see ``Transport.among``) and message number."""


class Network(Protocol):
    def send(self, to: int, message: Tensor, key: MessageKey) -> None:
        """Take a message, which is unchanged only until its transfer was waited for."""
        ...

    def receive(self, pending: Sequence[PendingReceive], key: MessageKey) -> Callable[[], None] | None:
        """Start to fill one post's messages; return a call that waits for them, or None."""
        ...


class Nobody:
    """A network that takes every message and brings none: buffers hold whatever they hold. ``seen`` is told of each."""

    def __init__(self, seen: Callable[[Tensor], None] | None = None) -> None:
        self.seen = seen

    def send(self, to: int, message: Tensor, key: MessageKey) -> None:
        if self.seen is not None:
            self.seen(message)

    def receive(self, pending: Sequence[PendingReceive], key: MessageKey) -> Callable[[], None] | None:
        if self.seen is not None:
            for each in pending:
                self.seen(each.read())


class FakeTransport:
    """One rank's messages to and from a network; they count like real ones."""

    def __init__(self, network: Network, name: str = "", ranks: Sequence[int] | None = None) -> None:
        """Choose the numbering of peers: by network rank, or by index into ``ranks``."""
        self._network, self._name, self._ranks = network, name, ranks

    def among(self, ranks: Sequence[int], name: str) -> "FakeTransport":
        return FakeTransport(self._network, f"{self._name} {name}", ranks)

    def empty(self, spec: TensorSpec) -> Tensor:
        return spec.empty()

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, TensorSpec]], message: int
    ) -> tuple[Transfer, list[PendingReceive]]:
        key = self._name, message
        pending = [PendingReceive(self._rank(peer), spec, spec.empty()) for peer, spec in receives]
        wait = self._network.receive(pending, key) if pending else None
        for peer, buffer in sends:
            assert buffer.is_contiguous(), "messages are contiguous"
            self._network.send(self._rank(peer), buffer, key)
        return Transfer((), [buffer for _, buffer in sends], note_post(sends, receives, message), wait), pending

    def _rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]
