"""Watchdog of a user's own loop, which names a rank that ends, dies or stays away while others wait.

A loop may take any time between two calls. A wait in a call or backward pass lasts as long as the process group
allows; a little before that, all ranks learn who is missing, and end.
"""

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringspan.torch.consistency.watchdog import Watchdog
from ringspan.torch.runtime.timeout import timeout_seconds

_OUTSIDE: Final = "outside of ringspan"
_ANY_TIME: Final = float("inf")
_LEAVING_SECONDS: Final = 5.0  # that a call waits for a rank whose process has ended


@dataclass(frozen=True)
class _Settings:
    """Settings without steps of known length: a rank may be silent as long as others may wait for it."""

    silence_seconds: float
    enabled: bool = True
    timeout_steps: float = _ANY_TIME
    min_seconds: float = _ANY_TIME
    patience_seconds: float = _ANY_TIME


class LoopWatch:
    """This rank's current call, as its main thread tells the watchdog."""

    def __init__(self, mesh: DeviceMesh) -> None:
        # Before the process group's own time-out, which would end the ranks without saying who is missing.
        self.patience_seconds = 0.8 * timeout_seconds(mesh["ring"].get_group(), torch.device(mesh.device_type))
        settings = _Settings(silence_seconds=self.patience_seconds)
        self._watchdog = Watchdog(settings, None, leaving_seconds=_LEAVING_SECONDS)
        self._num_passes = 0
        self._watchdog.__enter__()
        # There is no call by which a loop of somebody else's says that it is over.
        atexit.register(self._leave)

    @contextmanager
    def call(self, name: str, *, is_pass: bool) -> Iterator[None]:
        """Mark a call that waits for other ranks."""
        self._num_passes += is_pass
        self._watchdog.be(self._num_passes, name, self.patience_seconds)
        try:
            yield
        except RuntimeError:  # how an exchange with a rank that is gone fails: let it be named
            self._watchdog.await_verdict()
            raise
        finally:
            self._outside()

    def backward_of(self, loss: Tensor) -> None:
        """Count a loss's backward pass as a call."""
        if loss.requires_grad:
            loss.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        self._watchdog.be(self._num_passes, "a backward pass", self.patience_seconds)
        # As FSDP2 finds the end of a backward pass; autograd has no public way.
        torch.autograd.Variable._execution_engine.queue_callback(self._outside)  # pyright: ignore[reportAttributeAccessIssue]

    def _outside(self) -> None:
        self._watchdog.be(self._num_passes, _OUTSIDE, _ANY_TIME)

    def _leave(self) -> None:
        """Tell the watchdog that the process ends, by itself or by the exception just shown."""
        error = getattr(sys, "last_value", None)
        self._watchdog.__exit__(type(error), error, None)


_watch: LoopWatch | None = None


def watch_loop(mesh: DeviceMesh) -> None:
    """Start watching all ranks of the world, once per process; all ranks call it."""
    global _watch
    group = mesh["ring"].get_group()
    # A mesh over a part of the world would take ranks for missing that have nothing to do with it.
    if _watch is None and 1 < dist.get_world_size() == mesh.size() and dist.get_backend(group) != "fake":
        _watch = LoopWatch(mesh)


@contextmanager
def in_call(name: str, *, is_pass: bool = False) -> Iterator[None]:
    """Mark a call that all ranks make."""
    if _watch is None:
        yield
        return
    with _watch.call(name, is_pass=is_pass):
        yield


def watch_backward(loss: Tensor) -> Tensor:
    """Return the loss; its backward counts as a call before FSDP's own hooks, which may wait.

    The gradient may be a ``DTensor``, if a penalty on weights was added.
    """
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else None)
    if _watch is not None:
        _watch.backward_of(loss)
    return loss
