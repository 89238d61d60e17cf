"""Detection of dead and stalled ranks: a thread per rank reports to rank 0, which judges and tells all.

A connection that closes without a farewell names a dead rank at once, while gloo and NCCL report an address, or nothing
for half an hour. A rank whose step and exchanges stand still for ten median steps is stalled: silent ranks (stopped,
cut off) are named first, else those with the least progress. Other activities, such as saving, may take longer unless
the rank is silent. Every rank then prints a line, dumps its stacks into the run's folder and ends with a documented
exit code, since a thread cannot unblock a collective; a silent rank of the same machine is killed. Messages are JSON
lines over TCP on the process group's network, as trusted as that is; a token keeps strangers apart.
"""

import faulthandler
import json
import math
import os
import secrets
import selectors
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from ringspan.core.errors import (
    EXIT_PEER_LOST,
    EXIT_STALLED,
    ConfigError,
    RingspanError,
)
from ringspan.core.files.output import refusal
from ringspan.core.messages.lines import shortened
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.runtime.environment import is_launched
from ringspan.torch.runtime.flight_recorder import is_recording, write_calls
from ringspan.torch.runtime.host import boot_id


@dataclass
class Place:
    # Beats of its main thread and posted exchanges, which grow while a rank works.
    count: tuple[int, int] = (
        0,
        0,
    )
    step: int = 0
    hop: int | None = None
    doing: str = "starting"
    patience_seconds: float = float("inf")
    process: tuple[str, int] | None = None
    changed: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def hear(self, message: dict[str, Any]) -> None:
        """Take over a rank's report; ``changed`` is the time of its last progress, ``heard`` of its last report."""
        self.heard = time.monotonic()
        count = int(message["count"][0]), int(message["count"][1])
        if count != self.count:
            self.count, self.changed = count, self.heard
        self.step, self.hop, self.doing = (
            int(message["step"]),
            message["hop"],
            str(message["doing"]),
        )
        self.patience_seconds = float(message["patience_seconds"])
        self.process = str(message["machine"]), int(message["pid"])

    def describe(self) -> str:
        hop = f", hop {self.hop}" if self.hop is not None else ""
        doing = f" ({self.doing})" if self.doing != "step" else ""
        return f"at step {self.step}{hop}{doing}"


_MEASURED_STEPS: Final = 3
# wait after a failed exchange for the verdict on its cause
_VERDICT_SECONDS: Final = 2.0
# delay of the watching thread that is normal on a busy machine
_PAUSE_SECONDS: Final = 1.0
_MAX_LINE_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    silence_seconds: float
    patience_seconds: float = math.inf
    min_seconds: float = math.inf
    timeout_steps: float = math.inf
    enabled: bool = True


@dataclass
class _Link:
    """A connection to another rank; ``rank`` is None until it has introduced itself."""

    socket: socket.socket
    rank: int | None = None
    received: bytes = b""
    farewell: bool = False


class Watchdog:
    """Watchdog over the other ranks.

    ``step`` and ``doing`` note this rank's progress, and ``end`` exits with a code.
    """

    def __init__(
        self,
        config: Limits,
        folder: Path | None,
        end: Callable[[int], Any] = os._exit,
        *,
        leaving_seconds: float = float("inf"),
    ) -> None:
        """Write stacks to stderr if there is no ``folder``.

        Name a rank that left once others wait ``leaving_seconds`` for it.
        """
        self._config, self._folder, self._end, self._leaving_seconds = (
            config,
            folder,
            end,
            leaving_seconds,
        )
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        # Many ranks report less often, so that rank 0 can keep up.
        self._interval = max(0.2, self._num_ranks / 100)
        self._beats, self._step, self._doing = 0, 0, "starting"
        self._patience_seconds = config.patience_seconds
        self._seconds: deque[float] = deque(maxlen=50)
        self._started: float | None = None
        self._places: dict[int, Place] = {}
        self._left: dict[int, Place] = {}
        self._links: list[_Link] = []
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        self._farewell: dict[str, Any] = {"bye": None}
        self._is_refused = False  # True once another rank has raised a refusal, which it reports itself
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._machine = _machine()

    def __enter__(self) -> "Watchdog":
        """Connect all ranks to rank 0; ConfigError on every rank if one cannot be."""
        if not self._config.enabled or self._num_ranks == 1:
            return self
        self._meet()
        self._places[self._rank] = Place()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # An exchange with a lost peer fails with RuntimeError: wait for the verdict that names it.
        """Say farewell; tell the others of a failure of only this rank, not of a shared refusal."""
        if isinstance(error, RuntimeError):
            self.await_verdict()
        # The library's own errors are raised on all ranks, so no rank needs to be told. Unwritable output
        # is reported by the launcher, which ends the other ranks; until then, their exchanges with this rank fail.
        is_refusal = isinstance(error, RingspanError) or (
            error is not None and is_launched() and refusal(error)
        )
        if is_refusal:
            self._farewell = {"bye": None, "refused": True}
        elif error is not None and not (
            self._is_refused and isinstance(error, RuntimeError)
        ):
            self._farewell = {"bye": shortened(f"{type(error).__name__}: {error}")}
        self._closing.set()
        self._wake.send(b"x")
        if self._thread is not None:
            self._thread.join()
        for link in self._links:
            link.socket.close()
        for each in (self._selector, self._wake, self._woken):
            each.close()

    def step(self, step: int) -> None:
        now = time.monotonic()
        if self._started is not None:
            self._seconds.append(now - self._started)
        self._started, self._step, self._doing = now, step, "step"
        self._patience_seconds = self._config.patience_seconds
        # A median, since a few steps, such as those that save, take longer without being stalled.
        if len(self._seconds) >= _MEASURED_STEPS:
            median = statistics.median(self._seconds)
            self._patience_seconds = max(
                self._config.min_seconds, self._config.timeout_steps * median
            )
        self._beats += 1

    def await_verdict(self) -> None:
        """Wait briefly after a failed exchange for the verdict that ends this process."""
        if self._thread is not None:
            leaving = self._leaving_seconds + 1.0
            time.sleep(
                max(_VERDICT_SECONDS, leaving if math.isfinite(leaving) else 0.0)
            )

    def be(self, step: int, doing: str, patience_seconds: float) -> None:
        self._step, self._doing, self._patience_seconds = step, doing, patience_seconds
        self._beats += 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before = self._doing, self._patience_seconds
        self._doing, self._patience_seconds = what, self._config.patience_seconds
        self._beats += 1
        yield
        self._started = None
        self._doing, self._patience_seconds = before
        self._beats += 1

    def _meet(self) -> None:
        """Open rank 0's port, broadcast its address with a token, and connect all other ranks to it.

        If any rank cannot connect, raise ConfigError on all of them.
        """
        answer: list[Any] = [None]
        server = None
        if self._rank == 0:
            try:
                server = _listen()
                # A token, since any process on the network can connect to the port.
                answer = [(*server.getsockname()[:2], secrets.token_hex(16))]
            except OSError as error:
                answer = [
                    f"rank 0 cannot listen for the other ranks: {error}; set watchdog.enabled = false"
                ]
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], str):
            raise ConfigError(answer[0])
        host, port, self._token = answer[0]
        if server is not None:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ, "server")
            self._server = server
        failure = self._connect(host, port) if server is None else None
        # No rank continues before all are connected: one that ended at once would seem dead to later ones.
        failures: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(failures, failure)
        if reason := next(filter(None, failures), None):
            for each in (server, *(link.socket for link in self._links)):
                if each is not None:
                    each.close()
            raise ConfigError(reason)

    def _connect(self, host: str, port: int) -> str | None:
        """Connect to rank 0; return why that is not possible, if it is not."""
        try:
            link = _Link(socket.create_connection((host, port), timeout=30), rank=0)
        except OSError as error:
            return (
                f"rank {self._rank} cannot connect to rank 0 at {host}:{port}: {error}; open that port, or set "
                "watchdog.enabled = false"
            )
        self._send(link, {"token": self._token, "rank": self._rank})
        self._add(link)
        self._places[0] = Place()
        return None

    def _add(self, link: _Link) -> None:
        link.socket.settimeout(1.0)
        # Messages are a line each, and late ones look like a rank that hangs.
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(link)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _accept(self) -> None:
        """Accept all pending connections."""
        with suppress(BlockingIOError):
            while True:
                self._add(_Link(self._server.accept()[0]))

    def _watch(self) -> None:
        """Receive, report and judge in turn until the watchdog is closed, then say farewell; runs in its own thread."""
        told, looked = 0.0, time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(self._interval):
                if key.data == "server":
                    self._accept()
                elif isinstance(key.data, _Link):
                    self._receive(key.data)
            now = time.monotonic()
            # Time in which this thread itself did not run, as in a stopped job, does not count as other ranks' silence.
            missed, looked = (
                max(0.0, now - looked - self._interval - _PAUSE_SECONDS),
                now,
            )
            for place in self._places.values():
                place.changed, place.heard = (
                    place.changed + missed,
                    place.heard + missed,
                )
            if now - told >= self._interval:
                told = now
                self._tell()
                self._judge(now)
        if self._rank == 0:
            self._accept()  # a pending rank that got no farewell would take this one for dead
        self._tell()  # the last progress of this rank
        for link in self._links:
            self._send(link, self._farewell)
        if self._rank == 0:
            self._server.close()

    def _tell(self) -> None:
        message = {
            "rank": self._rank,
            "count": (self._beats, COUNTERS.num_posts),
            "step": self._step,
            "hop": COUNTERS.hop,
            "doing": self._doing,
            "patience_seconds": self._patience_seconds,
            "machine": self._machine,
            "pid": os.getpid(),
        }
        self._places[self._rank].hear(message)
        for link in self._links:
            self._send(link, message)

    def _send(self, link: _Link, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a lost connection is noticed when receiving
            link.socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, link: _Link) -> None:
        """Read from a connection and handle its complete lines; a closed one without farewell is a dead rank."""
        try:
            data = link.socket.recv(_MAX_LINE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._drop(link)
            if link.rank is not None and not link.farewell:
                self._lost(link.rank, "died")
            return
        *lines, link.received = (link.received + data).split(b"\n")
        if len(link.received) > _MAX_LINE_BYTES:
            self._drop(link)
            return
        for line in lines:
            try:
                self._hear(link, json.loads(line))
            # The other side does not speak this protocol.
            except (
                ValueError,
                KeyError,
                TypeError,
                IndexError,
                AttributeError,
            ):
                self._drop(link)
                return

    def _hear(self, link: _Link, message: dict[str, Any]) -> None:
        """Handle a message: an introduction by token, a farewell, a refusal, a verdict, or a report of progress."""
        if link.rank is None:
            rank = int(message["rank"])
            if message["token"] != self._token or not 0 < rank < self._num_ranks:
                raise ValueError("a stranger")
            link.rank = rank
            self._places[rank] = Place()
        elif "bye" in message:
            link.farewell = True
            if message.get("refused"):
                self._hear_of_refusal(link)
            if message["bye"] is not None:
                self._lost(link.rank, f"failed with {message['bye']}")
            if (place := self._places.pop(link.rank, None)) is not None:
                self._left[link.rank] = place
        elif "refused" in message:
            self._hear_of_refusal(link)
        elif "verdict" in message:
            self._finish(str(message["verdict"]), int(message["code"]))
        else:
            self._places[link.rank].hear(message)

    def _hear_of_refusal(self, link: _Link) -> None:
        """Note on all ranks that one raised a refusal, so that exchanges of the others fail because of it."""
        self._is_refused = True
        if self._rank == 0:
            for other in self._links:
                if other is not link:
                    self._send(other, {"refused": True})

    def _drop(self, link: _Link) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        with suppress(ValueError):
            self._links.remove(link)
        link.socket.close()

    def _lost(self, rank: int, how: str) -> None:
        place = self._places.get(rank)
        self._conclude(
            f"rank {rank} {how} {place.describe() if place else f'after step {self._step}'}",
            EXIT_PEER_LOST,
        )

    def _judge(self, now: float) -> None:
        """Conclude that ranks are stalled or have left, if so; rank 0 judges all ranks, the others only rank 0."""
        if self._judge_leaving(now):
            return
        places = (
            self._places
            if self._rank == 0
            else {r: p for r, p in self._places.items() if r == 0}
        )
        silence = self._config.silence_seconds
        stalled = [
            p
            for p in places.values()
            if now - p.changed > p.patience_seconds or now - p.heard > silence
        ]
        if not stalled:
            return
        seconds = max(now - place.changed for place in stalled)
        silent = {
            r: p
            for r, p in places.items()
            if now - p.heard > max(1.0, 4 * self._interval)
        }
        if silent:
            missing, how = silent, "silent, stopped or cut off"
            self._kill(silent.values())
        elif self._rank == 0:
            missing, how = _furthest_behind(places)
        else:
            return
        shown = ", ".join(
            f"rank {rank} {place.describe()}"
            for rank, place in sorted(missing.items())[:8]
        )
        self._conclude(
            f"no progress for {seconds:.1f} s: {shown} ({how})", EXIT_STALLED
        )

    def _judge_leaving(self, now: float) -> bool:
        """Conclude that a rank has left the others, if one of them has waited too long; return whether it has."""
        for rank, left in self._left.items():
            waiting = [
                p
                for p in self._places.values()
                if now - p.changed > self._leaving_seconds
                and math.isfinite(p.patience_seconds)
            ]
            if waiting:
                how = f"ended {left.describe()}, which others wait for {waiting[0].describe()}"
                self._conclude(
                    f"rank {rank} {how}; make each call on every rank", EXIT_PEER_LOST
                )
                return True
        return False

    def _kill(self, silent: Iterable[Place]) -> None:
        """End silent processes of this machine.

        A stopped process does not end or free its GPU, and its launcher would wait for it.
        """
        for place in silent:
            if place.process is not None and place.process[0] == self._machine:
                with suppress(OSError):
                    os.kill(place.process[1], signal.SIGKILL)

    def _conclude(self, verdict: str, code: int) -> None:
        for link in self._links:
            self._send(link, {"verdict": verdict, "code": code})
        self._finish(verdict, code)

    def _finish(self, verdict: str, code: int) -> None:
        """Print the verdict, dump the stacks of all threads to the folder or stderr, and end with the exit code."""
        here = Place(step=self._step, hop=COUNTERS.hop, doing=self._doing)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        line = f"ringspan: {verdict}; rank {self._rank} ends {here.describe()}, exit code {code}"
        if self._folder is None:
            print(line, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        else:
            path = self._folder / f"attempt-{attempt}-rank-{self._rank}.txt"
            line += f", stacks in {path}"
            line += self._recorded_calls(attempt)
            with suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                with path.open("w", encoding="utf-8") as file:
                    file.write(line + "\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            print(line, file=sys.stderr, flush=True)
        self._end(code)
        self._closing.set()

    def _recorded_calls(self, attempt: str) -> str:
        """Write what torch's flight recorder has, if it is on; return words of where."""
        if self._folder is None or not is_recording():
            return ""
        path = self._folder / f"calls-attempt-{attempt}-rank-{self._rank}"
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        return f", last calls in {path}" if write_calls(path) else ""


def _furthest_behind(places: dict[int, Place]) -> tuple[dict[int, Place], str]:
    """Return the ranks with the least progress, which all others wait for, and how they are."""
    first = min(place.count for place in places.values())
    missing = {r: p for r, p in places.items() if p.count == first}
    if len(missing) < len(places):
        return missing, "furthest behind"
    return missing, "no rank is behind another"


def _machine() -> str:
    """Return an identity of the machine: boot id and pid namespace, equal if processes can signal each other."""
    try:
        return boot_id() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(16)  # equal to no other rank's


def _listen() -> socket.socket:
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(
        (str(address[0]), 0), family=family, backlog=dist.get_world_size()
    )
