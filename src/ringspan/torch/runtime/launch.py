"""Launching of ranks on one machine through torch elastic."""

import fcntl
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessExitedException

from ringspan.core import errors
from ringspan.core.errors import (
    EXIT_PEER_LOST,
    EXIT_STALLED,
    ConfigError,
    RankLost,
    RingspanError,
)
from ringspan.core.files.output import drop_output, refusal
from ringspan.torch.runtime.forks import (
    ABORT_AFTER_SECONDS,
    STOP_SIGNALS,
    serve_forks,
    settle,
    start_resource_tracker,
)

_RENDEZVOUS_BYTES: Final = 1 << 20
_STOP: Final = "stop"
# more processes than this on one machine is a slip of the keyboard
MOST_RANKS: Final = 1024
_POLL_SECONDS: Final = 0.1  # how often elastic looks at the ranks
_NOTICE_SECONDS: Final = 30.0  # time for elastic to notice a killed rank
_WAIT_SECONDS: Final = 10.0  # silent wait for the other ranks of a job
_LOGGERS: Final = (  # loggers that report how ranks ended
    "torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)  # fmt: skip

# Returns freed tensors to the system at once, in huge pages, which are nearly as quick to get as reused memory. By
# default glibc keeps blocks of up to 32 MB, between small ones that stay, where later tensors do not fit. glibc reads
# this when the process starts.
_THRIFT: Final = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}:glibc.malloc.hugetlb=1"
}


def launch(
    function: Callable[..., Any], num_ranks: int, *args: object, threads: int | None = None, max_restarts: int = 0,
    forward_signals: bool = False, is_thrifty: bool = False,
) -> list[Any]:  # fmt: skip
    """Run ``function(*args)`` on ``num_ranks`` local processes that form the default process group; results by rank.

    Ranks meet through a file and talk over loopback, with ``threads`` CPU threads (default: an equal share of the
    cores) and a CUDA device each. If one dies, all are restarted, at most ``max_restarts`` times, but not after a
    refusal. A stop signal is forwarded to the ranks with ``forward_signals``, and a second SIGINT kills them; otherwise
    the first one ends them. ``thrifty`` ranks free large tensors' memory at once (glibc, unless GLIBC_TUNABLES is set).
    On Linux without CUDA ranks fork, in a tenth of a second, from one process with the first launch's environment and
    imports.

    Raises:
        ConfigError: fewer than one rank, more than ``MOST_RANKS``, or more than CUDA devices when there are any.
        RingspanError: an error of a rank, with its message, or an output that it could not write.
        RankLost: a rank was killed, or ended because another one stalled or was lost.
        RuntimeError: a rank failed in another way.
        KeyboardInterrupt: the launcher was told to stop; the ranks are gone.
    """
    _check_ranks(num_ranks)
    # A new attempt must not read addresses of the one before, which torch's shared store would return.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    threads = threads or max(1, (os.cpu_count() or 1) // num_ranks)
    start_resource_tracker()
    # A fork has its server's allocator, which was set up when that started.
    are_forks = not is_thrifty and serve_forks(function.__module__)
    with tempfile.TemporaryDirectory(prefix="ringspan-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            max_restarts=max_restarts,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder, "rendezvous")),
            rdzv_configs={"store_type": "file"},
            run_id=uuid.uuid4().hex,
            start_method="forkserver" if are_forks else "spawn",
            # torch itself ends the ranks 30 s after a signal; only SIGQUIT keeps that meaning.
            signals_to_handle="SIGQUIT"
            if forward_signals
            else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            monitor_interval=_POLL_SECONDS,
            local_addr="localhost",
        )
        try:
            with (
                _without_refusals(Path(folder)),
                _forwarding(Path(folder)) if forward_signals else nullcontext(),
                _environment(_THRIFT) if is_thrifty else nullcontext(),
            ):
                results = elastic_launch(config, _work)(function, folder, threads, args)
        except SignalException as signalled:
            raise KeyboardInterrupt from signalled
        # A stop signal may come before the ranks can handle it.
        except ChildFailedError as failure:
            if Path(folder, _STOP).exists():
                raise KeyboardInterrupt from None
            raise _refusal(Path(folder)) or _failure(Path(folder), failure) from None
    return [results[rank] for rank in range(num_ranks)]


def _check_ranks(num_ranks: int) -> None:
    """Raise ConfigError for a number of ranks that this machine, or this process's limits, cannot start."""
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks: at least 1 is needed")
    if num_ranks > MOST_RANKS:
        raise ConfigError(
            f"{num_ranks} ranks: at most {MOST_RANKS:,} are started on one machine"
        )
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{num_ranks} ranks need as many CUDA devices; this machine has {torch.cuda.device_count()}"
        )
    if (
        0
        <= (largest := resource.getrlimit(resource.RLIMIT_FSIZE)[0])
        < _RENDEZVOUS_BYTES
    ):
        # If the file does not fit, torch's store retries forever.
        raise ConfigError(
            f"ulimit -f allows files of {largest} bytes, and ranks meet through one of up to {_RENDEZVOUS_BYTES:,}; "
            "raise it"
        )


def join(folder: str | None = None, *, timeout: timedelta | None = None) -> None:
    """Join torchrun's default process group, or ``launch``'s given a folder; ranks wait for ``timeout``."""
    device = local_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if folder is None:
        with _said_while_waiting():
            dist.init_process_group(backend, timeout=timeout, **_nccl(device))
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/ranks-{attempt}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=10),
        **_nccl(device),
    )


def _nccl(device: torch.device) -> dict[str, Any]:
    return (
        {"device_id": device, "pg_options": urgent()} if device.type == "cuda" else {}
    )


def urgent() -> object:
    """Return NCCL options with high-priority streams: messages need not wait for attention."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _said_while_waiting() -> Iterator[None]:
    """Report, once per node, that ranks are still missing: torch waits silently."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    line = (
        f"rank {os.environ.get('RANK')} has waited {_WAIT_SECONDS:.0f} s at {place} for all "
        f"{os.environ.get('WORLD_SIZE')} ranks of this job; start those that are missing, and see that they reach it"
    )
    timer = threading.Timer(
        _WAIT_SECONDS,
        print,
        (f"ringspan: {line}",),
        {"file": sys.stderr, "flush": True},
    )
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def local_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    missing = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


@contextmanager
def _forwarding(folder: Path) -> Iterator[None]:
    """Forward stop signals to ranks, kill at a second SIGINT, and end late starters by a note."""
    # After the ranks have ended, further signals are ignored: they could only change the exit code.
    interrupted: list[float] = []

    def forward(number: int, frame: FrameType | None) -> None:
        (folder / _STOP).touch()
        if number == signal.SIGINT:
            interrupted.append(time.monotonic())
            if interrupted[-1] - interrupted[0] >= ABORT_AFTER_SECONDS:
                # All are killed at once, so that none is left to report the loss of another.
                number = signal.SIGKILL
        for process in multiprocessing.active_children():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        was_told = (folder / _STOP).exists()
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if was_told else handler)


@contextmanager
def _without_refusals(folder: Path) -> Iterator[None]:
    """Leave only tracebacks of failed ranks in torch's log; the caller reports refusals, deaths and ordered ends."""
    is_told_to_stop = False

    def is_failure(record: logging.LogRecord) -> bool:
        nonlocal is_told_to_stop
        # elastic's first message about a signal to end.
        is_told_to_stop |= "death signal" in record.getMessage()
        is_raised = record.exc_info is not None and not isinstance(
            record.exc_info[1], ProcessExitedException
        )
        return is_raised and not (
            is_told_to_stop or _refusal(folder) or (folder / _STOP).exists()
        )

    for name in _LOGGERS:
        logging.getLogger(name).addFilter(is_failure)
    try:
        yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(is_failure)


def _work(
    function: Callable[..., Any], folder: str, threads: int, args: tuple[Any, ...]
) -> object:
    """Run ``function(*args)`` as one rank, in a process that elastic has started.

    A refusal, or a failure, is noted in a file of ``folder`` for the launcher. A rank that fails because another one
    was killed waits until elastic has noticed that, so that the killed rank is the one reported.
    """
    if Path(folder, _STOP).exists():
        # The stop signal came in the attempt before this one.
        sys.exit(130)
    if refused := _refusal(Path(folder)):
        raise refused
    attempt, rank = (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        int(os.environ["RANK"]),
    )
    if attempt != "0" and rank == 0:
        print(
            f"ringspan: a rank ended early; restart {attempt} of all ranks",
            file=sys.stderr,
            flush=True,
        )
    # An interrupt ends a rank without a traceback, since the launcher reports it; a handler would run too late.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settle()
    torch.set_num_threads(threads)
    alive = Path(folder, f"alive-{attempt}-{rank}")
    fcntl.lockf(os.open(alive, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    try:
        join(folder)
        return function(*args)
    except Exception as error:
        if refused := refusal(error):
            Path(folder, f"refusal-{rank}.json").write_text(
                json.dumps([type(refused).__name__, str(refused)])
            )
            drop_output()
            raise
        # Written before the group is destroyed: that makes other ranks fail too, and elastic may see only those.
        record = [
            -int(attempt),
            time.monotonic(),
            rank,
            f"{type(error).__name__}: {error}",
        ]
        note = Path(folder, f"failure-{attempt}-{rank}.json")
        note.write_text(json.dumps(record))
        # If another rank's death is the cause, give a launcher that may be busy time to see that first.
        deadline = time.monotonic() + _NOTICE_SECONDS
        time.sleep(2 * _POLL_SECONDS)
        while _has_lost_a_rank(alive) and time.monotonic() < deadline:
            note.unlink(missing_ok=True)
            time.sleep(_POLL_SECONDS)
        raise
    finally:
        alive.unlink(missing_ok=True)  # a rank that gets here was not killed
        if dist.is_initialized():
            dist.destroy_process_group()


def _has_lost_a_rank(alive: Path) -> bool:
    """Return whether another rank was killed: its file exists, and the kernel has released its lock."""
    for other in {*alive.parent.glob(f"{alive.name.rpartition('-')[0]}-*")} - {alive}:
        with suppress(OSError), other.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def _refusal(folder: Path) -> RingspanError | None:
    for path in sorted(folder.glob("refusal-*.json")):
        name, message = json.loads(path.read_text())
        return getattr(errors, name, RingspanError)(message)
    return None


def _failure(folder: Path, failure: ChildFailedError) -> RuntimeError:
    """Return the error of a failed launch: a killed rank, else the earliest failure, else the watchdog's exit code.

    Failures that a rank's death has caused in others are not reported.
    """
    codes = {one.exitcode for one in failure.failures.values()}
    code = EXIT_STALLED if EXIT_STALLED in codes else EXIT_PEER_LOST
    # elastic ends the remaining ranks by SIGTERM.
    for rank, one in sorted(failure.failures.items()):
        if one.exitcode < 0 and one.exitcode != -signal.SIGTERM:
            return RankLost(
                f"rank {rank} failed: killed by {signal.Signals(-one.exitcode).name}; see its output",
                code,
            )
    if failures := [
        json.loads(path.read_text()) for path in folder.glob("failure-*.json")
    ]:
        *_, rank, reason = min(failures)  # the first of the last attempt
        return RuntimeError(f"rank {rank} failed: {reason.splitlines()[0]}")
    if code in codes:
        line = "a rank died or was not heard from any more, and the others ended with it; the watchdog's line names it"
        return RankLost(line, code)
    rank, first = failure.get_first_failure()
    line = (
        "see its output"
        if isinstance(first.message, str)
        else first.message["message"].splitlines()[0]
    )
    return RuntimeError(f"rank {rank} failed (exit code {first.exitcode}): {line}")
