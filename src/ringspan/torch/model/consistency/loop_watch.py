"""Missing ranks in a user's own loop, which may take any time between two calls.

Without a watchdog, ranks whose exchange failed leave a message in torch's store and print which ranks left none. With
one (``parallelize(watchdog=True)``), all learn who is missing shortly before the process group's time-out, and end.
"""

import atexit
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from traceback import walk_tb
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringspan.core.messages.lines import few
from ringspan.torch.model.consistency.watchdog import Limits, Watchdog
from ringspan.torch.runtime.mesh import timeout_seconds

_OUTSIDE: Final = "outside of ringspan"
_ANY_TIME: Final = float("inf")
_LEAVING_SECONDS: Final = 5.0  # wait of a call for a rank whose process has ended
_WORD_SECONDS: Final = 3.0  # wait for other ranks to notice a failed exchange
_WORD: Final = "ringspan/failed exchange of rank"


class LoopWatch:
    def __init__(self, mesh: DeviceMesh) -> None:
        # Shorter than the process group's time-out, which would end the ranks without naming the missing one.
        self.patience_seconds = 0.8 * timeout_seconds(
            mesh.get_group("ring"), torch.device(mesh.device_type)
        )
        # A rank may be silent as long as others may wait for it.
        limits = Limits(silence_seconds=self.patience_seconds)
        self._watchdog = Watchdog(limits, None, leaving_seconds=_LEAVING_SECONDS)
        self._num_passes = 0
        self._watchdog.__enter__()
        # A user's loop makes no call when it is over.
        atexit.register(self._leave)

    @contextmanager
    def call(self, name: str, *, is_pass: bool) -> Iterator[None]:
        self._num_passes += is_pass
        self._watchdog.be(self._num_passes, name, self.patience_seconds)
        try:
            yield
        # An exchange with a lost rank fails like this: wait for the verdict that names it.
        except RuntimeError:
            self._watchdog.await_verdict()
            raise
        finally:
            self._outside()

    def backward_of(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        self._watchdog.be(self._num_passes, "a backward pass", self.patience_seconds)
        # FSDP2 finds the end of a backward pass this way too; autograd has no public one.
        torch.autograd.Variable._execution_engine.queue_callback(self._outside)  # pyright: ignore[reportAttributeAccessIssue]

    def _outside(self) -> None:
        self._watchdog.be(self._num_passes, _OUTSIDE, _ANY_TIME)

    def _leave(self) -> None:
        error = getattr(sys, "last_value", None)
        self._watchdog.__exit__(type(error), error, None)


_watch: LoopWatch | None = None


def watch_loop(mesh: DeviceMesh) -> None:
    """Start watching all ranks of the world, once per process; all ranks call it."""
    global _watch
    group = mesh.get_group("ring")
    # On a mesh over part of the world, ranks outside of it would seem missing.
    if (
        _watch is None
        and 1 < dist.get_world_size() == mesh.size()
        and dist.get_backend(group) != "fake"
    ):
        _watch = LoopWatch(mesh)


@contextmanager
def in_call(name: str, *, is_pass: bool = False) -> Iterator[None]:
    if _watch is not None:
        with _watch.call(name, is_pass=is_pass):
            yield
        return
    try:
        yield
    except RuntimeError as error:
        _say_once(error, name)
        raise


@cache
def say_at_the_end() -> None:
    """Print who is missing also if an exchange outside of all calls ends the process; once per process.

    FSDP and the ring exchange messages in backward, which the user's loop starts.
    """
    atexit.register(_say_of_last)


def _say_of_last() -> None:
    # The interpreter leaves the exception that ended the process here.
    error = getattr(sys, "last_value", None)
    if error is not None and _watch is None:
        functions = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
        _say_once(
            error,
            "a backward pass" if "_engine_run_backward" in functions else "the loop",
        )


def _say_once(error: BaseException, call: str) -> None:
    # gloo's errors have no class of their own.
    is_of_exchange = isinstance(error, dist.DistError) or "gloo/" in str(error)
    if is_of_exchange and dist.is_initialized() and not hasattr(error, "ring_said"):
        # in nested calls, only the innermost reports the error
        vars(error)["ring_said"] = True
        _say_who_is_missing(call)


def _say_who_is_missing(call: str) -> None:
    """Print the ranks that leave no message in the store: they are gone, or busy with something else."""
    rank, others = (
        dist.get_rank(),
        [other for other in range(dist.get_world_size()) if other != dist.get_rank()],
    )
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"{_WORD} {rank}", call)
        time.sleep(_WORD_SECONDS)
        missing = [
            str(other) for other in others if not store.check([f"{_WORD} {other}"])
        ]
    except RuntimeError:
        # Rank 0 held the store.
        missing = ["0"]
    who = f"no word from rank {few(missing)}" if missing else "all ranks are there"
    print(
        f"ringspan: rank {rank} lost an exchange in {call}; {who}",
        file=sys.stderr,
        flush=True,
    )


def watch_backward(loss: Tensor) -> Tensor:
    """Return the loss with a hook that the watchdog sees before FSDP's; it also makes ``DTensor`` gradients plain."""
    if loss.requires_grad:
        loss.register_hook(
            lambda gradient: (
                gradient.full_tensor() if isinstance(gradient, DTensor) else None
            )
        )
    if _watch is not None:
        _watch.backward_of(loss)
    return loss
