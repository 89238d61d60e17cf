"""Local attention kernels with one contract, a file each, and the choice between them.

A kernel of your own is registered with ``ringspan.kernels.register`` on every rank; a package registers its own by the
entry point group ``ringspan.kernels``. It computes where ``kernel=NAME`` asks for it; ``auto`` does not choose it.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.tile import Tile
from ringspan.core.packages import of_packages
from ringspan.torch.engine.kernels.contract import InPlace, Memory, Returning, Scores
from ringspan.torch.engine.kernels.device import rules_of
from ringspan.torch.engine.kernels.local.aten import CpuFlash, Cudnn, is_slow_at
from ringspan.torch.engine.kernels.local.eager import Eager
from ringspan.torch.engine.kernels.local.flash import (
    Flash,
    Flash2,
    Flash3,
    Flash4,
    TorchFlash,
)
from ringspan.torch.engine.kernels.local.triton import TritonAttention

KERNELS: Final[dict[str, Returning | InPlace]] = {
    kernel.name: kernel
    for kernel in (
        Cudnn(),
        Flash("flash3", Flash3()),
        Flash("flash4", Flash4()),
        Flash("flash2", Flash2()),
        Flash("flash", TorchFlash()),
        TritonAttention(),
        CpuFlash(),
        Eager(),
    )
}
_GROUP: Final = "ringspan.kernels"
_METHODS: Final = {
    True: ("why_not", "launches", "forward_into", "backward_into"),
    False: ("why_not", "launches", "forward", "backward"),
}
"""What a kernel has, by whether it ``adds_in_place``."""
_registered: Final[dict[str, Returning | InPlace]] = {}
_num_changes: int = 0  # how often kernels were given a name


def register(kernel: Returning | InPlace, *, replace: bool = False) -> None:
    """Register a kernel under its name on this rank: call it on every rank, before attention or ``parallelize``.

    Raises:
        ConfigError: it lacks a kernel's methods, or its name is ``auto`` or another kernel's, unless ``replace``.
            ringspan's own cannot be replaced.
    """
    if not _is_kernel(kernel):
        raise ConfigError(
            f"register takes a kernel, got {type(kernel).__name__}; it needs the methods and attributes of "
            "ringspan.kernels.Returning or InPlace"
        )
    if kernel.name == "auto" or kernel.name in KERNELS:
        raise ConfigError(
            f"kernel {kernel.name!r} is ringspan's own; give yours another name"
        )
    if kernel.name in _of_packages() | _registered and not replace:
        raise ConfigError(
            f"kernel {kernel.name!r} is registered already; use replace=True to take its place"
        )
    _registered[kernel.name] = kernel
    _note_change()


def _note_change() -> None:
    global _num_changes
    _num_changes += 1


def num_changes() -> int:
    """Return how often kernels were given a name, for keys of what is remembered of them."""
    return _num_changes


def known() -> dict[str, Returning | InPlace]:
    """Return all kernels by name: ringspan's own, installed packages', and registered ones."""
    return KERNELS | _of_packages() | _registered


def kernel_of(name: str) -> Returning | InPlace:
    """Return a kernel by its name, which ``check_name`` has found."""
    for space in (KERNELS, _registered):
        if name in space:
            return space[name]
    return _of_packages()[name]


def check_name(name: str) -> None:
    """Raise UnsupportedError unless a kernel has this name, or it is ``auto``."""
    if name != "auto" and name not in KERNELS and name not in known():
        raise UnsupportedError(
            f"unknown kernel {name!r}; choose one of {', '.join(('auto', *known()))}"
        )


def _is_kernel(kernel: object) -> bool:
    in_place: Any = getattr(kernel, "adds_in_place", None)
    if isinstance(kernel, type) or not isinstance(in_place, bool):
        return False
    wanted = ("name", "memory", *_METHODS[in_place])
    return all(hasattr(kernel, each) for each in wanted)


@cache
def _of_packages() -> dict[str, Returning | InPlace]:
    found: Any = of_packages(_GROUP, _is_kernel, "kernel")
    return {kernel.name: kernel for kernel in found}


# What "auto" prefers, for few rectangles and squares, and for anything else. On Hopper (benchmarks/results, gpu-*.json)
# FlashAttention 4 is the fastest of all with any mask. cuDNN computes squares nearly twice as fast as FlashAttention 2,
# but it has no other band, needs a call for each square, and makes a plan for each new size, which takes longer than a
# hop and is never freed. Our own kernel is faster than the remaining ones forward, but not backward.
_FEW: Final = 4
_MOST_PLANS: Final = 64  # more sizes than masks without documents have; documents bring new ones with every batch
_FOR_SQUARES: Final = (
    "flash4",
    "cudnn",
    "flash3",
    "flash2",
    "flash",
    "cpu",
    "triton",
    "eager",
)
_FOR_ANYTHING: Final = (
    "flash4",
    "flash3",
    "flash2",
    "flash",
    "cudnn",
    "cpu",
    "triton",
    "eager",
)
_FORWARD_ON_HOPPER: Final = ("flash4", "flash3", "triton", *_FOR_ANYTHING)
_HOPPER: Final = 9  # the first number of its compute capability


@contextmanager
def registered(*kernels: Returning | InPlace) -> Iterator[None]:
    before = dict(KERNELS)
    KERNELS.update({kernel.name: kernel for kernel in kernels})
    _note_change()
    try:
        yield
    finally:
        KERNELS.update(before)
        _note_change()


def why_not(kernel: str, q: Tensor, v: Tensor, scores: Scores) -> str | None:
    return None if kernel == "auto" else kernel_of(kernel).why_not(q, v, scores)


def refused(kernel: str, reason: str) -> UnsupportedError:
    """Return the error, equal on every rank, for a kernel that cannot serve."""
    return UnsupportedError(
        f"kernel {kernel!r} cannot serve: {reason}; choose another, or auto"
    )


_served: Final[dict[Hashable, tuple[str, ...]]] = {}


def forget_served() -> None:
    """Ask the kernels again, for example since a package was installed."""
    _served.clear()


def serving(kernel: str, q: Tensor, v: Tensor, scores: Scores) -> tuple[str, ...]:
    """Return the kernels for a pass: the requested one, or for ``auto`` all that can serve."""
    if kernel != "auto":
        return (kernel,)
    # Everything that our kernels' ``why_not`` reads.
    asked = (
        _num_changes,
        rules_of(q.device),
        q.device,
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        scores.scale > 0,
        scores.softcap,
        scores.slopes is None,
    )
    found = _served.get(asked)
    if found is None:
        found = _served[asked] = _serving(q, v, scores)
    return found


def _serving(q: Tensor, v: Tensor, scores: Scores) -> tuple[str, ...]:
    """Return all of our kernels that can serve and are not slow here."""
    # On a CPU, Triton is only interpreted, and PyTorch's own kernel may be slower than plain PyTorch in 16 bits.
    is_slow_in_16_bits = not rules_of(q.device).multiplies_16_bits
    slow = {
        "triton": q.device.type != "cuda",
        "cpu": q.dtype.itemsize < 4 and is_slow_in_16_bits,
    }
    names = (name for name in KERNELS if not slow.get(name))
    return tuple(name for name in names if KERNELS[name].why_not(q, v, scores) is None)


def laid_out(names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as all serving kernels can read them, copied if necessary."""
    return _memory_of(names, _num_changes).laid_out(*tensors)


@lru_cache(maxsize=64)
def _memory_of(names: tuple[str, ...], num_changes: int) -> Memory:
    return Memory.of_all(kernel_of(name).memory for name in names)


def choose(
    names: tuple[str, ...],
    tiles: tuple[Tile, ...],
    q: Tensor,
    *,
    is_backward: bool = False,
) -> Returning | InPlace:
    """Return the fastest of the named kernels for these tiles and queries.

    A few rectangles and squares have another order of preference than other bands. cuDNN is left out if it would need a
    plan too many, or if results must be deterministic.
    """
    if len(names) == 1:
        return kernel_of(names[0])
    left_out = {"cpu"} if "cpu" in names and is_slow_at(tiles, q) else set[str]()
    are_few_squares = _are_few_squares(tiles)
    order = _FOR_SQUARES if are_few_squares else _for_bands(q, is_backward=is_backward)
    if (
        "cudnn" in names
        and are_few_squares
        and not _is_planned(tiles, q, is_backward=is_backward)
    ):
        left_out.add("cudnn")
    if is_backward and torch.are_deterministic_algorithms_enabled():
        left_out.add("cudnn")  # its operator does not ask for that mode
    able = [name for name in order if name in names]
    return KERNELS[next((name for name in able if name not in left_out), able[0])]


def _are_few_squares(tiles: tuple[Tile, ...]) -> bool:
    """Return whether tiles are few, and each a rectangle without a mask or a causal square."""
    return len(tiles) <= _FEW and all(
        tile.is_full or (tile.is_causal and tile.num_rows == tile.num_keys)
        for tile in tiles
    )


def _for_bands(q: Tensor, *, is_backward: bool) -> tuple[str, ...]:
    is_hopper = rules_of(q.device).capability[0] == _HOPPER
    return _FORWARD_ON_HOPPER if is_hopper and not is_backward else _FOR_ANYTHING


# Sizes that this process has given to cuDNN, which keeps a plan for each.
_planned: Final[set[tuple[Any, ...]]] = set()


def _is_planned(tiles: tuple[Tile, ...], q: Tensor, *, is_backward: bool) -> bool:
    """Return whether cuDNN has a plan for each of these tiles, or room for another."""
    sizes = {
        (
            *q.shape[:2],
            q.shape[3],
            tile.num_rows,
            tile.num_keys,
            tile.is_full,
            is_backward,
        )
        for tile in tiles
    }
    if len(_planned | sizes) > _MOST_PLANS:
        return False
    _planned.update(sizes)
    return True
