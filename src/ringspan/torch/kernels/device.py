"""What is decided by the device that computes: how work is cut up, which kernels run there, where tensors wait."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ringspan.core.schedule.kernel_launches import SHORT
from ringspan.gpu import support


class ChunkSize(NamedTuple):
    """How much plain PyTorch computes at once: rows, keys, and scores of all heads together."""

    rows: int
    keys: int
    scores: int


LARGE_CHUNKS: Final = ChunkSize(256, 1024, 1 << 40)


@dataclass(frozen=True, kw_only=True)
class DeviceRules:
    """How a device is worked on. ``rules_of`` finds them by a tensor's device, unless ``ruled_by`` says others."""

    cuts_for_cores: bool
    """Heads are grouped for the threads of a CPU rather than for launches that fill a device."""
    chunk_size: ChunkSize | None = LARGE_CHUNKS
    """Of plain PyTorch; None for what stays in a core's cache, which depends on the tile."""
    short_rows: tuple[float, float] | None = None
    """Where plain PyTorch is quicker than the kernel of CPUs, in float32: rows that see at least so many keys over all
    heads together, and at most so many each."""
    multiplies_16_bits: bool = True
    """Whether the kernel of CPUs is quicker in 16 bits than plain PyTorch."""
    offloads_to: Literal["file", "pinned", "nowhere"] = "file"
    """Where offloaded tensors wait (``ringspan.torch.memory.offload``)."""
    probe_tokens: int = 24
    """On how many tokens a module is tried out: enough for a router that fills experts to a capacity to drop some when
    all choose alike."""
    assumed_speeds: tuple[float, float, float] = (4e14, 3e11, 2.5e10)
    """FLOP/s, and bytes/s within a node and between nodes, where nothing was measured: by default those of the class
    of an H100."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability."""
    has_cudnn: bool = False
    has_package: Callable[[str], bool] = support.is_installed


_ruled: Final[dict[str, DeviceRules]] = {}  # by the type of a device


def rules_of(device: torch.device) -> DeviceRules:
    """The rules in force for a device."""
    return _ruled.get(device.type) or _own_rules(device)


@contextmanager
def ruled_by(**rules: DeviceRules) -> Iterator[None]:
    """While this context is active, devices of a type (``cpu=...``, ``cuda=...``) are worked on by these rules.

    In the whole process, since autograd runs backward passes in threads of its own.
    """
    before = dict(_ruled)
    _ruled.update(rules)
    try:
        yield
    finally:
        _ruled.clear()
        _ruled.update(before)


@lru_cache(maxsize=64)
def _own_rules(device: torch.device) -> DeviceRules:
    if device.type == "cpu":
        return DeviceRules(
            cuts_for_cores=True,
            chunk_size=None,
            short_rows=(384, SHORT),
            multiplies_16_bits=multiplies_16_bits(),
            assumed_speeds=(1e11, 2e9, 1e9),  # of a core
        )
    if device.type == "cuda":
        return DeviceRules(
            cuts_for_cores=False,
            offloads_to="pinned",
            capability=torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0),
            has_cudnn=torch.backends.cudnn.is_available(),
        )
    return DeviceRules(cuts_for_cores=False)


def multiplies_16_bits() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than float32 ones (AMX, AVX512_BF16): where an x86 CPU does
    not, PyTorch's kernel takes half as long again as it does in float32, and three times as long on short documents.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def runs_triton(x: Tensor) -> bool:
    """Whether our own kernels run where ``x`` is: a CUDA device with float32 sums and an installed Triton."""
    return x.device.type == "cuda" and x.dtype == torch.float32 and rules_of(x.device).has_package("triton")


def half_precision_on_cuda(q: Tensor, capability: tuple[int, int]) -> str | None:
    """Why tensors like ``q`` are not of half precision on a CUDA device of this compute capability; None if they
    are.
    """
    if q.device.type != "cuda":
        return f"it needs CUDA tensors, these are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, these are {str(q.dtype).removeprefix('torch.')}"
    found = rules_of(q.device).capability
    if found < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}, this device has {found[0]}.{found[1]}"
    return None
