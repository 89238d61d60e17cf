"""Accelerators known to the planner, with vendors' numbers per device: ``devices.toml``, which has their sources.

FLOP/s are dense bfloat16 (half of a data sheet's "with sparsity"), accumulated in float32; bytes/s of one direction.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GIGA: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links; numbers that are not known are 0.

    ``flops``: dense bfloat16 FLOP/s; the efficiencies are the shares of it that good matrix products and flash
    attention (forward, backward) reach. Bandwidths are bytes/s: of its memory, of links in one direction to a device of
    its node (a TPU: to a neighbour in its slice) or of another, and to the host. ``host_memory_bytes`` is a device's
    share; without host numbers nothing is offloaded. ``launch_seconds``: what the host takes for one pass of a layer,
    forward, recomputation or backward, however few the tokens; 0 if whole steps are one program. ``note``: what was
    assumed about the name that was asked for.
    """

    name: str
    title: str
    flops: float
    memory_bytes: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    devices_per_node: int = 8
    memory_bandwidth: float = 0.0
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    host_bandwidth: float = 0.0
    host_memory_bytes: int = 0
    launch_seconds: float = 2e-3
    note: str = ""

    def bandwidth(self, ranks: int) -> float:
        return (
            self.intra_node_bandwidth
            if ranks <= self.devices_per_node
            else self.inter_node_bandwidth
        )


_FILE: Final = tomllib.loads(
    Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
)
DEVICES: Final = {
    name: Device(name=name, **row) for name, row in _FILE["devices"].items()
}
# A name may mean two devices: the second of a pair is the less common one.
OTHER_NAMES: Final[dict[str, tuple[str, str]]] = {
    name: tuple(pair) for name, pair in _FILE["names"].items()
}
