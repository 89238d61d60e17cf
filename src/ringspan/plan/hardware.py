"""Accelerators: what a device computes, holds and sends. Peak numbers are the vendors', per device and direction."""

from dataclasses import dataclass, replace
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.plan.names import normal, unknown

GIGA: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links.

    ``flops`` is dense bfloat16 FLOP/s. Bandwidths are bytes/s that one device sends in one direction: to a device of
    its node (on a TPU: to a neighbour in its slice), and to one of another node. The efficiencies are the shares of
    ``flops`` that good matrix products and flash attention (forward and backward) reach. ``host_bandwidth`` is to the
    host, and ``host_memory_bytes`` a device's share of its memory; 0 where they are not known: nothing is offloaded
    then.
    """

    name: str
    title: str
    flops: float
    memory_bytes: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    devices_per_node: int
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    host_bandwidth: float = 0.0
    host_memory_bytes: int = 0

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s of the slowest link of a ring of neighbouring devices."""
        return self.intra_node_bandwidth if ranks <= self.devices_per_node else self.inter_node_bandwidth


def min_block_tokens(flops: float, bandwidth: float) -> float:
    """Tokens c of a block from which computing hides sending: ``4 d c^2 / F >= 4 c d / B``, so ``c = F / B``.

    A query block meets a key block in 4 d c^2 FLOPs, while 2 tensors of c x d bfloat16 numbers travel. Heads do not
    matter; grouped key/value heads, causal masks and float32 change the constant, which ``cost`` accounts for.
    Source: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", section 3.
    """
    return flops / bandwidth


def min_tokens_per_device(block_tokens: float) -> float:
    """A ring holds six blocks at least: query, current and next key and value, and output (same source)."""
    return 6 * block_tokens


def _gpu(
    name: str,
    title: str,
    teraflops: float,
    gigabytes: int,
    nvlink: float,
    network: float,
    attention: float,
    host: tuple[float, int],
):
    return Device(
        name=name,
        title=title,
        flops=teraflops * 1e12,
        memory_bytes=gigabytes * GIGA,
        intra_node_bandwidth=nvlink * GIGA,
        inter_node_bandwidth=network * GIGA,
        devices_per_node=8,
        matmul_efficiency=0.7,
        attention_efficiency=attention,
        host_bandwidth=host[0] * GIGA,
        host_memory_bytes=host[1] * GIGA,
    )


def _tpu(name: str, title: str, teraflops: float, gigabytes: int, interconnect: float, slice_size: int):
    """Links of a TPU slice are the same everywhere, so the slice is the node."""
    return Device(
        name=name,
        title=title,
        flops=teraflops * 1e12,
        memory_bytes=gigabytes * GIGA,
        intra_node_bandwidth=interconnect * GIGA,
        inter_node_bandwidth=interconnect * GIGA,
        devices_per_node=slice_size,
    )


# Sources, and what each was checked against; docs/planning.md says the same for its readers.
# A100: 312 TFLOP/s dense bfloat16, 600 GB/s NVLink and 64 GB/s PCIe gen 4 both ways (NVIDIA A100 data sheet; digests of
# it that quote the numbers were read). H100, H200 (SXM): 989 TFLOP/s dense, half of the sheet's 1,979 with sparsity,
# 900 GB/s NVLink, 128 GB/s PCIe gen 5 (digests of their data sheets). B200: 2.25 PFLOP/s dense, 1.8 TB/s NVLink in an
# HGX B200 at 1,000 W (digest of the Blackwell architecture brief); 180 GB, of DGX B200's 1,440 GB, was not checked.
# One direction is half. Memory counts 10^9 bytes a GB; the devices have some 6% more, which is left to the runtime, the
# communication library and fragmentation. Host memory: an eighth of the 2 TB of DGX A100 (the larger one) and DGX H100;
# those of DGX H200 and B200 were not checked and are taken to be alike, as is PCIe gen 5 for the B200.
# Network: one adapter a GPU, NDR InfiniBand of 400 Gb/s (50 GB/s), which is an assumption about a cluster; for the A100
# the 12.5 GB/s of table 2 of arXiv 2310.01889v4.
# Attention: FlashAttention-2 (Dao 2023, abstract: 72% model FLOPs utilization in training on A100) and its 35% of an
# H100 (Shah et al. 2024, FlashAttention-3, abstract); PyTorch's flash kernel is that algorithm. The other efficiencies
# are assumptions: measure yours.
# TPU: FLOP/s, memory and links of v3, v4, v5e are those of table 2 of arXiv 2310.01889v4, from which its block sizes
# follow (Google says 197 TFLOP/s of v5e); v5p: 459 TFLOP/s, 95 GB, 4,800 Gb/s (digest of Google's pages). The chips of
# a slice are Google's; those of v3 and v5e were not checked.
_DEVICES: Final = (
    _gpu("a100-40gb", "NVIDIA A100 40 GB", 312, 40, 300, 12.5, 0.60, (32, 125)),
    _gpu("a100-80gb", "NVIDIA A100 80 GB", 312, 80, 300, 12.5, 0.60, (32, 250)),
    _gpu("h100-80gb", "NVIDIA H100 80 GB", 989, 80, 450, 50, 0.35, (64, 250)),
    _gpu("h200", "NVIDIA H200 141 GB", 989, 141, 450, 50, 0.35, (64, 250)),
    _gpu("b200", "NVIDIA B200 180 GB", 2250, 180, 900, 50, 0.30, (64, 250)),
    _tpu("tpu-v3", "TPU v3", 123, 16, 112, 1024),
    _tpu("tpu-v4", "TPU v4", 275, 32, 268, 4096),
    _tpu("tpu-v5e", "TPU v5e", 196, 16, 186, 256),
    _tpu("tpu-v5p", "TPU v5p", 459, 95, 600, 8960),
)
DEVICES: Final = {device.name: device for device in _DEVICES}

_BY_HAND: Final = (
    "flops",
    "memory_bytes",
    "intra_node_bandwidth",
    "inter_node_bandwidth",
    "devices_per_node",
    "host_bandwidth",
    "host_memory_bytes",
)


def device(text: str) -> Device:
    """A device of the table, or one given by hand.

    By hand: ``flops=2e12,memory_bytes=16e9,intra_node_bandwidth=1e10,inter_node_bandwidth=1e9,devices_per_node=4``;
    the last two may be left out (one node), ``host_bandwidth`` and ``host_memory_bytes`` may be added, without which
    nothing is offloaded, and a table name may come first, to change some of its values:
    ``h100-80gb,inter_node_bandwidth=25e9``.

    Raises:
        ConfigError: an unknown name (near ones are listed) or a value that is not a positive number.
    """
    name, *changes = text.split(",")
    if "=" in name:
        base, changes = None, [name, *changes]
    elif normal(name) in DEVICES:
        base = DEVICES[normal(name)]
    else:
        raise unknown("device", name, DEVICES, "; or give one by hand: flops=...,memory_bytes=...")
    values = dict(_read(change) for change in changes)
    if base is not None:
        return _replace(base, values)
    missing = [field for field in _BY_HAND[:3] if field not in values]
    if missing:
        raise ConfigError(f"--device {text!r}: a device given by hand also needs {', '.join(missing)}")
    defaults = {"inter_node_bandwidth": values["intra_node_bandwidth"], "devices_per_node": float(1 << 30)}
    return _replace(_Unnamed, {**defaults, **values})


_Unnamed: Final = Device(
    name="by-hand",
    title="device given by hand",
    flops=1,
    memory_bytes=1,
    intra_node_bandwidth=1,
    inter_node_bandwidth=1,
    devices_per_node=1,
)


def _read(change: str) -> tuple[str, float]:
    field, _, number = change.partition("=")
    if field not in _BY_HAND:
        raise unknown("property of a device", field, _BY_HAND)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--device: {field}={number!r} should be a positive number")
    return field, value


def _replace(base: Device, values: dict[str, float]) -> Device:
    whole = {"memory_bytes", "devices_per_node", "host_memory_bytes"}
    changes: dict[str, Any] = {name: int(value) if name in whole else value for name, value in values.items()}
    return replace(base, **changes)
