"""Offloading of checkpointed tensors: to pinned memory, fetched one piece ahead (CUDA), or to mapped files."""

import mmap
import os
import sys
import tempfile
import weakref
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ringspan.core.errors import ConfigError
from ringspan.torch.engine.kernels.device import rules_of

MIN_BYTES = 1 << 16
# Pieces that are fetched ahead: a layer's input, its attention's result and log-sum-exp.
_AHEAD: Final = 3


class Store:
    """Store of tensors, best fetched in reverse order; parameters, integers and small tensors stay on the device.

    A file vanishes with the tensor in it.
    """

    def __init__(
        self,
        *,
        min_bytes: int | None = None,
        folder: str | None = None,
        is_ordered: bool = True,
    ) -> None:
        self.min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        self.folder, self._is_ordered = folder, is_ordered
        self.parked_bytes = 0  # over all time
        self._newest: weakref.ref[_Parked] | None = None

    @property
    def moves(self) -> bool:
        """True if any tensor is large enough to be moved."""
        return self.min_bytes < sys.maxsize

    def put(self, tensor: Tensor) -> "Tensor | _Parked":
        """Return a stand-in for the tensor, or the tensor itself if it stays."""
        # Parameters stay in memory anyway, and for small tensors the transfer costs more than it gains.
        if (
            isinstance(tensor, nn.Parameter)
            or tensor.nbytes < max(1, self.min_bytes)
            or not tensor.is_floating_point()
        ):
            return tensor
        before = self._newest() if self._newest is not None else None
        parked = _PLACES[rules_of(tensor.device).offloads_to](
            tensor, before, self.folder
        )
        # A weak reference, so that a pass dropped without backward frees its tensors.
        self._newest = weakref.ref(parked) if self._is_ordered else None
        self.parked_bytes += tensor.nbytes
        return parked

    def get(self, parked: "Tensor | _Parked", *, again: bool = False) -> Tensor:
        """Return the tensor of ``put``; ``again`` also prefetches it next time."""
        return parked if isinstance(parked, Tensor) else parked.get(again=again)

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.put, self.get)


class _Parked:
    def __init__(
        self, tensor: Tensor, before: "_Parked | None", folder: str | None
    ) -> None:
        self._before = None if before is None else weakref.ref(before)
        self._wanted = True

    def get(self, *, again: bool) -> Tensor:
        self._wanted = again
        tensor = self._bring()
        earlier = self
        for _ in range(_AHEAD):
            earlier = earlier._before and earlier._before()
            if earlier is None:
                break
            # A tensor that was fetched and is not wanted again is not fetched.
            if earlier._wanted:
                earlier.fetch()
        return tensor

    def fetch(self) -> None:
        """Start fetching, once."""
        raise NotImplementedError

    def _bring(self) -> Tensor:
        raise NotImplementedError


class _Mapped(_Parked):
    def __init__(
        self, tensor: Tensor, before: _Parked | None, folder: str | None
    ) -> None:
        super().__init__(tensor, before, folder)
        with tempfile.TemporaryFile(prefix="ringspan-offload-", dir=folder) as file:
            _reserve(file.fileno(), tensor.nbytes, folder)
            self._map = mmap.mmap(file.fileno(), tensor.nbytes)
        self._view = torch.frombuffer(self._map, dtype=tensor.dtype).view(tensor.shape)
        self._view.copy_(tensor.detach())
        # The pages belong to the file now, and this process gives them up.
        self._advise("MADV_DONTNEED")

    def fetch(self) -> None:
        self._advise("MADV_WILLNEED")

    def _bring(self) -> Tensor:
        tensor = self._view.clone()
        self._advise("MADV_DONTNEED")
        return tensor

    def _advise(self, advice: str) -> None:
        if hasattr(mmap, advice):
            self._map.madvise(getattr(mmap, advice))


def _reserve(file: int, num_bytes: int, folder: str | None) -> None:
    """Reserve a file's disk space if possible: writing to an unbacked map page kills the process silently."""
    if not hasattr(os, "posix_fallocate"):
        os.truncate(file, num_bytes)
        return
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"offload: no room for {num_bytes:,} bytes in {folder or tempfile.gettempdir()} ({error.strerror}); "
            "set TMPDIR to a folder on a disk with more"
        ) from error


class _Pinned(_Parked):
    def __init__(
        self, tensor: Tensor, before: _Parked | None, folder: str | None
    ) -> None:
        """Start to copy a tensor to pinned memory, on a stream of its own, after the work that computes the tensor."""
        super().__init__(tensor, before, folder)
        self._device = tensor.device
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None
        source, stream = tensor.detach(), _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
        # Keeps the allocator from reusing the tensor's memory before the copy is done.
        source.record_stream(stream)

    def fetch(self) -> None:
        if self._coming is not None:
            return
        stream = _stream(self._device)
        tensor = torch.empty(
            self._host.shape, dtype=self._host.dtype, device=self._device
        )
        # The last use of that memory may still be running.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            tensor.copy_(self._host, non_blocking=True)
        tensor.record_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
        self._coming = tensor, done

    def _bring(self) -> Tensor:
        self.fetch()
        assert self._coming is not None
        (tensor, done), self._coming = self._coming, None
        torch.cuda.current_stream(self._device).wait_event(done)
        return tensor


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Nowhere(_Parked):
    """A tensor without memory, whose values are not needed, until it is fetched."""

    def __init__(
        self, tensor: Tensor, before: _Parked | None, folder: str | None
    ) -> None:
        super().__init__(tensor, before, folder)
        self._empty = partial(
            torch.empty, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device
        )
        self._coming: Tensor | None = None

    def fetch(self) -> None:
        self._coming = self._empty()

    def _bring(self) -> Tensor:
        coming, self._coming = self._coming, None
        return self._empty() if coming is None else coming


_PLACES: Final[dict[str, type[_Parked]]] = {
    "file": _Mapped,
    "pinned": _Pinned,
    "nowhere": _Nowhere,
}
