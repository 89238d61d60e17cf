"""Local attention kernels behind one contract, a file each, and which of them computes what."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.tile import Tile
from ringspan.torch.kernels.contract import InPlace, Returning
from ringspan.torch.kernels.device import rules_of
from ringspan.torch.kernels.local.cpu import CpuFlash, is_slow_at
from ringspan.torch.kernels.local.cudnn import Cudnn
from ringspan.torch.kernels.local.eager import Eager
from ringspan.torch.kernels.local.flash import Flash, Flash2, Flash3, Flash4, TorchFlash
from ringspan.torch.kernels.local.triton import TritonAttention
from ringspan.torch.kernels.memory import Memory
from ringspan.torch.kernels.score_mod import Scores

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
# What "auto" prefers, for rectangles and squares that are few or large, and for anything else. On Hopper
# (benchmarks/results, gpu-*.json) cuDNN computes these nearly twice as fast as FlashAttention 2, but knows no other
# band, and takes a call for each; of the others our own kernel is the fastest forward, and none is backward.
_FEW: Final = 4
_LARGE: Final = 1024  # rows of a tile on average
_FOR_SQUARES: Final = ("cudnn", "flash3", "flash4", "flash2", "flash", "cpu", "triton", "eager")
_FOR_ANYTHING: Final = ("flash3", "flash2", "flash", "flash4", "cudnn", "cpu", "triton", "eager")
_FORWARD_ON_HOPPER: Final = ("flash3", "triton", *_FOR_ANYTHING)
_HOPPER: Final = 9  # the first number of its compute capability


@contextmanager
def registered(*kernels: Returning | InPlace) -> Iterator[None]:
    """Register kernels under their names while this context is active."""
    before = dict(KERNELS)
    KERNELS.update({kernel.name: kernel for kernel in kernels})
    try:
        yield
    finally:
        KERNELS.update(before)


def why_not(kernel: str, q: Tensor, v: Tensor, scores: Scores) -> str | None:
    """Return why a kernel requested by name cannot serve; None if it can."""
    return None if kernel == "auto" else KERNELS[kernel].why_not(q, v, scores)


def refused(kernel: str, reason: str) -> UnsupportedError:
    """Return the error, equal on every rank, for a kernel that cannot serve."""
    return UnsupportedError(f"kernel {kernel!r} cannot serve: {reason}; choose another, or auto")


def serving(kernel: str, q: Tensor, v: Tensor, scores: Scores) -> tuple[str, ...]:
    """Return the kernels for a pass: the requested one, or for ``auto`` all that can serve."""
    if kernel != "auto":
        return (kernel,)
    # Triton is only interpreted on a CPU, and PyTorch's own kernel for CPUs slower there than plain PyTorch in 16 bits.
    is_slow_in_16_bits = not rules_of(q.device).multiplies_16_bits
    slow = {"triton": q.device.type != "cuda", "cpu": q.dtype.itemsize < 4 and is_slow_in_16_bits}
    names = (name for name in KERNELS if not slow.get(name))
    return tuple(name for name in names if KERNELS[name].why_not(q, v, scores) is None)


def laid_out(names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as all serving kernels can read them, copied if necessary; received ones are contiguous."""
    return Memory.of_all(KERNELS[name].memory for name in names).laid_out(*tensors)


def choose(
    names: tuple[str, ...], tiles: tuple[Tile, ...], q: Tensor, *, is_backward: bool = False
) -> Returning | InPlace:
    """Return the serving kernel for a hop's tiles."""
    if "cpu" in names and is_slow_at(tiles, q):
        names = tuple(name for name in names if name != "cpu") or names
    are_worth_a_call = len(tiles) <= _FEW or sum(tile.num_rows for tile in tiles) >= _LARGE * len(tiles)
    if are_worth_a_call and all(map(_is_square, tiles)):
        order = _FOR_SQUARES
    else:
        is_hopper = rules_of(q.device).capability[0] == _HOPPER
        order = _FORWARD_ON_HOPPER if is_hopper and not is_backward else _FOR_ANYTHING
    return KERNELS[next(name for name in order if name in names)]


def _is_square(tile: Tile) -> bool:
    return tile.is_full or (tile.is_causal and tile.num_rows == tile.num_keys)
