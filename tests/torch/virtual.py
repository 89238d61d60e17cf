"""A ring of threads in one process: every rank's real loop, with queues for messages. For fuzzing many ranks
quickly.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ringspan.torch.engine.transport.exchange import PendingReceive, TensorSpec
from ringspan.torch.engine.transport.protocol import FakeTransport, MessageKey

Queue = queue.Queue[Tensor]
# on a GPU, kernels are compiled meanwhile
_PATIENCE_SECONDS = 120 if torch.cuda.is_available() else 30


class Mailbox:
    """The network as one of the threads sees it (``transport.protocol.Network``), and what it has sent."""

    def __init__(
        self,
        rank: int,
        queues: dict[tuple[int, int, MessageKey], Queue],
        turn: threading.Lock,
    ) -> None:
        """``queues`` are by sender, receiver and message; ``turn`` is held by the thread that computes."""
        self._rank, self._queues, self._turn = rank, queues, turn
        self.num_sends = 0
        self.sent_bytes = 0

    def send(self, to: int, message: Tensor, key: MessageKey) -> None:
        self._queues[self._rank, to, key].put(message.clone())
        self.num_sends += 1
        self.sent_bytes += message.nbytes

    def receive(
        self, pending: Sequence[PendingReceive], key: MessageKey
    ) -> Callable[[], None]:
        channels = [self._queues[each.sender, self._rank, key] for each in pending]

        def wait() -> None:
            for channel, each in zip(channels, pending, strict=True):
                arrived = self._take(channel)
                assert TensorSpec.like(arrived) == each.spec, (
                    "a message of another size or type"
                )
                each.read().copy_(arrived)

        return wait

    def _take(self, channel: Queue) -> Tensor:
        """The message in a channel; while there is none, it is the others' turn."""
        with suppress(queue.Empty):
            return channel.get_nowait()
        self._turn.release()
        try:
            return channel.get(timeout=_PATIENCE_SECONDS)
        finally:
            self._turn.acquire()


def on_ranks(
    ranks: int, function: Callable[[int, FakeTransport], Any]
) -> tuple[list[Any], list[Mailbox]]:
    """``function(rank, transport)`` on every rank, and what each has sent; no message may be left over.

    They take turns, each until it waits for a message: threads that compute at once would wait for Python's lock at
    every operator.
    """
    queues: dict[tuple[int, int, MessageKey], Queue] = defaultdict(queue.Queue)
    turn = threading.Lock()
    mailboxes = [Mailbox(rank, queues, turn) for rank in range(ranks)]
    results: list[Any] = [None] * ranks

    def call(rank: int) -> None:
        try:
            with turn, torch.no_grad():
                results[rank] = function(rank, FakeTransport(mailboxes[rank]))
        except BaseException as error:
            results[rank] = error

    threads = [
        threading.Thread(target=call, args=(rank,), daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 + _PATIENCE_SECONDS)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert all(channel.empty() for channel in queues.values()), (
        "a message was sent that nobody received"
    )
    return results, mailboxes
