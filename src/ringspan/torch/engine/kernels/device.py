"""Rules of a computing device: division of work, kernels and offloading."""

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
    """Amount that plain PyTorch computes at once: rows, keys, and scores of all heads together."""

    rows: int
    keys: int
    scores: int


LARGE_CHUNKS: Final = ChunkSize(256, 1024, 1 << 40)


# Compared by identity: caches of passes ask for every layer.
@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRules:
    cuts_for_cores: bool  # group heads for CPU threads rather than for large launches
    # sizes for plain PyTorch; None keeps a tile in a core's cache
    chunk_size: ChunkSize | None = LARGE_CHUNKS
    short_rows: tuple[float, float] | None = None
    """Least and most keys per row for which plain PyTorch beats the CPU kernel in float32, if some are hidden."""
    # True if the CPU kernel beats plain PyTorch in 16 bits
    multiplies_16_bits: bool = True
    offloads_to: Literal["file", "pinned", "nowhere"] = "file"
    """Destination of offloaded tensors (``ringspan.torch.model.memory.offload``)."""
    probe_tokens: int = 24  # tokens of a module's trial: enough to overflow an expert's capacity if all choose the same
    assumed_speeds: tuple[float, float, float] = (4e14, 3e11, 2.5e10)
    """Unmeasured FLOP/s, and bytes/s within a node and between nodes; default: H100 class."""
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability
    has_cudnn: bool = False
    has_package: Callable[[str], bool] = support.is_installed


_ruled: Final[dict[str, DeviceRules]] = {}  # keys are types of devices


def rules_of(device: torch.device) -> DeviceRules:
    return _ruled.get(device.type) or _own_rules(device)


@contextmanager
def ruled_by(**rules: DeviceRules) -> Iterator[None]:
    """Apply these rules to device types (``cpu=...``, ``cuda=...``) in all threads, since autograd uses its own."""
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
            short_rows=(96, SHORT),
            multiplies_16_bits=multiplies_16_bits(),
            assumed_speeds=(1e11, 2e9, 1e9),  # per core
        )
    if device.type == "cuda":
        return DeviceRules(
            cuts_for_cores=False,
            offloads_to="pinned",
            capability=torch.cuda.get_device_capability(device)
            if torch.cuda.is_available()
            else (0, 0),
            has_cudnn=torch.backends.cudnn.is_available(),
        )
    return DeviceRules(cuts_for_cores=False)


def multiplies_16_bits() -> bool:
    """Return whether this CPU has AMX or AVX512_BF16; others take 1.5 to 3 times as long in bfloat16 as in float32."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (
        not is_x86
        or torch.cpu._is_amx_tile_supported()
        or torch.cpu._is_avx512_bf16_supported()
    )


def runs_triton(x: Tensor) -> bool:
    return (
        x.device.type == "cuda"
        and x.dtype == torch.float32
        and rules_of(x.device).has_package("triton")
    )


def half_precision_on_cuda(q: Tensor, capability: tuple[int, int]) -> str | None:
    """Return why ``q`` is not half precision on CUDA of this compute capability; None if it is."""
    if q.device.type != "cuda":
        return f"it needs CUDA tensors, these are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, these are {str(q.dtype).removeprefix('torch.')}"
    found = rules_of(q.device).capability
    if found < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}, this device has {found[0]}.{found[1]}"
    return None
