"""A ring of threads in one process: every rank's real loop, with queues for messages. For fuzzing many ranks
quickly.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ringspan.torch.transport.exchange import PendingReceive, TensorSpec


class Queues:
    """Messages of one pass, by sender, receiver and number, and whose turn it is."""

    def __init__(self, turn: threading.Lock) -> None:
        self.turn = turn
        self._channels: dict[tuple[int, int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self._parts: dict[str, Queues] = {}

    def of(self, name: str) -> "Queues":
        """The queues of one kind of message of this pass."""
        return self._parts.setdefault(name, Queues(self.turn))

    def between(self, sender: int, receiver: int, message: int) -> "queue.Queue[Tensor]":
        return self._channels[sender, receiver, message]

    def are_empty(self) -> bool:
        return all(channel.empty() for channel in self._channels.values()) and all(
            p.are_empty() for p in self._parts.values()
        )


class VirtualExchange:
    """Stands in for ``ringspan.torch.transport.exchange.Exchange``: the same calls and counts."""

    def __init__(self, rank: int, queues: Queues, ranks: tuple[int, ...] | None = None) -> None:
        self._rank, self._queues, self._ranks = rank, queues, ranks
        self._others: dict[str, VirtualExchange] = {}
        self.num_sends = 0
        self.sent_bytes = 0
        self.sends: list[tuple[int, int]] = []

    def among(self, ranks: tuple[int, ...], name: str) -> "VirtualExchange":
        inner = VirtualExchange(self._rank, self._queues.of(name), ranks)
        self._others[name] = inner
        return inner

    def empty(self, spec: TensorSpec) -> Tensor:
        return spec.empty()

    def post(
        self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, TensorSpec]], message: int
    ) -> tuple["VirtualTransfer", list[PendingReceive]]:
        if self._ranks is not None:
            sends, receives = ([(self._ranks[peer], x) for peer, x in messages] for messages in (sends, receives))
        for peer, buffer in sends:
            assert buffer.is_contiguous()
            self._queues.between(self._rank, peer, message).put(buffer.clone())
            self.num_sends += 1
            self.sent_bytes += buffer.nbytes
            self.sends.append((message, peer))
        pending = [PendingReceive(peer, spec, spec.empty()) for peer, spec in receives]
        channels = [self._queues.between(peer, self._rank, message) for peer, _ in receives]
        return VirtualTransfer(list(zip(channels, pending, strict=True)), self._queues.turn), pending


class VirtualTransfer:
    def __init__(self, receives: list[tuple["queue.Queue[Tensor]", PendingReceive]], turn: threading.Lock) -> None:
        self._receives, self._turn = receives, turn

    def wait(self) -> None:
        for channel, receive in self._receives:
            arrived = self._take(channel)
            assert TensorSpec.like(arrived) == receive.spec, "a message of another size or type"
            receive.read().copy_(arrived)
        self._receives = []

    def _take(self, channel: "queue.Queue[Tensor]") -> Tensor:
        """The message in a channel; while there is none, it is the others' turn."""
        with suppress(queue.Empty):
            return channel.get_nowait()
        self._turn.release()
        try:
            return channel.get(timeout=10)
        finally:
            self._turn.acquire()


def on_ranks(ranks: int, function: Callable[[int, VirtualExchange], Any]) -> tuple[list[Any], list[VirtualExchange]]:
    """``function(rank, exchange)`` on every rank, and the exchanges; no message may be left over.

    They take turns, each until it waits for a message: threads that compute at once would wait for Python's lock at
    every operator.
    """
    queues = Queues(threading.Lock())
    exchanges = [VirtualExchange(rank, queues) for rank in range(ranks)]
    results: list[Any] = [None] * ranks

    def call(rank: int) -> None:
        try:
            with queues.turn, torch.no_grad():
                results[rank] = function(rank, exchanges[rank])
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert queues.are_empty(), "a message was sent that nobody received"
    return results, exchanges
