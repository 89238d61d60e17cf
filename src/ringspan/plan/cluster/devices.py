"""Accelerators known to the planner, with vendors' numbers per device.

FLOP/s are dense bfloat16 (half of a data sheet's "with sparsity"), accumulated in float32; bytes/s of one direction.
"""

from dataclasses import dataclass
from typing import Final

GIGA: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links; numbers that are not known are 0.

    ``flops``: dense bfloat16 FLOP/s; the efficiencies are the shares of it that good matrix products and flash
    attention (forward, backward) reach. Bandwidths are bytes/s: of its memory, of links in one direction to a device of
    its node (a TPU: to a neighbour in its slice) or of another, and to the host. ``host_memory_bytes`` is a device's
    share; without host numbers nothing is offloaded. ``note``: what was assumed about the name that was asked for.
    """

    name: str
    title: str
    flops: float
    memory_bytes: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    devices_per_node: int
    memory_bandwidth: float = 0.0
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.5
    host_bandwidth: float = 0.0
    host_memory_bytes: int = 0
    note: str = ""

    def bandwidth(self, ranks: int) -> float:
        return self.intra_node_bandwidth if ranks <= self.devices_per_node else self.inter_node_bandwidth


def _gpu(
    name: str, title: str, teraflops: float, memory: tuple[int, float], links: tuple[float, float], attention: float, *,
    matmul: float = 0.7, host: tuple[float, int] = (0, 0), per_node: int = 8,
) -> Device:  # fmt: skip
    return Device(
        name=name,
        title=title,
        flops=teraflops * 1e12,
        memory_bytes=memory[0] * GIGA,
        memory_bandwidth=memory[1] * GIGA,
        intra_node_bandwidth=links[0] * GIGA,
        inter_node_bandwidth=links[1] * GIGA,
        devices_per_node=per_node,
        matmul_efficiency=matmul,
        attention_efficiency=attention,
        host_bandwidth=host[0] * GIGA,
        host_memory_bytes=host[1] * GIGA,
    )


def _tpu(name: str, title: str, teraflops: float, memory: tuple[int, float], link: float, slice_size: int) -> Device:
    """Build a TPU; a slice, whose links are the same everywhere, is its node."""
    return Device(
        name=name,
        title=title,
        flops=teraflops * 1e12,
        memory_bytes=memory[0] * GIGA,
        memory_bandwidth=memory[1] * GIGA,
        intra_node_bandwidth=link * GIGA,
        inter_node_bandwidth=link * GIGA,
        devices_per_node=slice_size,
    )


# What holds for all of them:
# - Memory counts 10^9 bytes a GB; most devices have some 6% more, which is left to the runtime, the communication
#   library and fragmentation.
# - Network: one adapter a GPU, NDR InfiniBand of 400 Gb/s (50 GB/s), is an assumption about a cluster; for the A100 it
#   is the 12.5 GB/s of table 2 of arXiv 2310.01889v4.
# - Attention: 55% on an H100 and an H200, by cuDNN, forward and backward, and 65% for matrix products of a whole step
#   (benchmarks/results, gpu-*.json); FlashAttention-2 on an A100 (Dao 2023, abstract: 72% model FLOPs utilization in
#   training). The other efficiencies are assumptions: measure yours (``ringspan doctor``, ``ringspan bench ring``).
# - Host: PCIe x16 of 32 GB/s (gen 4) or 64 GB/s (gen 5) each way, and an eighth of the memory of the vendor's server.
# "Not confirmed" is a figure of which no data sheet or digest of one could be read when it was entered.
_DEVICES: Final = (
    # NVIDIA data sheet "A100": 312 TFLOP/s, 1,555 GB/s (40 GB) and 2,039 GB/s (80 GB SXM), NVLink 600 GB/s in total;
    # DGX A100: 1 or 2 TB of host memory.
    _gpu("a100-40gb", "NVIDIA A100 40 GB", 312, (40, 1555), (300, 12.5), 0.60, host=(32, 125)),
    _gpu("a100-80gb", "NVIDIA A100 80 GB", 312, (80, 2039), (300, 12.5), 0.60, host=(32, 250)),
    # NVIDIA data sheet "H100 SXM": 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 900 GB/s; DGX H100: 2 TB.
    _gpu("h100-80gb", "NVIDIA H100 80 GB", 989, (80, 3350), (450, 50), 0.55, matmul=0.65, host=(64, 250)),
    # NVIDIA data sheet "H200 SXM": the H100's FLOP/s, 141 GB, 4.8 TB/s. The memory of DGX H200 is not confirmed.
    _gpu("h200", "NVIDIA H200 141 GB", 989, (141, 4800), (450, 50), 0.55, matmul=0.65, host=(64, 250)),
    # H20, of which NVIDIA publishes no sheet: resellers agree on 148 TFLOP/s, 96 GB (there are some with 141), 4.0 TB/s
    # and NVLink 900 GB/s. It computes so little for its memory that attention is taken to reach the A100's share.
    _gpu("h20", "NVIDIA H20 96 GB", 148, (96, 4000), (450, 50), 0.60, host=(64, 250)),
    # HGX B200 and B300 (digests of NVIDIA's sheet: 36 PFLOP/s with sparsity of 8 devices, so 2,250 dense; 1.44 and
    # 2.1 TB usable of 8; up to 8 TB/s; NVLink 1.8 TB/s). B300 has 288 GB, of which 270 are usable. ConnectX-8 of B300:
    # 800 Gb/s. Host memory is not confirmed, and taken to be that of DGX H100.
    _gpu("b200", "NVIDIA B200 180 GB", 2250, (180, 8000), (900, 50), 0.30, host=(64, 250)),
    _gpu("b300", "NVIDIA B300 270 GB", 2250, (270, 8000), (900, 100), 0.30, host=(64, 250)),
    # GB200 and GB300 NVL72 (NVIDIA: 360 PFLOP/s with sparsity and 576 TB/s of 72 devices, so 2,500 dense and 8 TB/s;
    # 13.4 and 20 TB; NVLink 1.8 TB/s over all 72; 36 Grace with 480 GB each). One digest has 2,250 for GB200. The node
    # is the NVLink domain. NVLink-C2C of 900 GB/s in total is shared by the two GPUs of a Grace.
    _gpu("gb200", "NVIDIA GB200 186 GB", 2500, (186, 8000), (900, 50), 0.30, host=(225, 240), per_node=72),
    _gpu("gb300", "NVIDIA GB300 279 GB", 2500, (279, 8000), (900, 100), 0.30, host=(225, 240), per_node=72),
    # PCIe cards: links are PCIe x16 (a peer's copy through the host is slower, and GeForce cards have no other). Their
    # servers differ, so nothing is known of the host, and networks are assumptions: 400 Gb/s (L40S, RTX PRO 6000), 100
    # (L4, A10) and 10 (the others) per eight cards.
    # NVIDIA data sheets "L4" (242 TFLOP/s with sparsity, 300 GB/s), "L40S" (362 dense, 733 with sparsity as printed;
    # 864 GB/s), "A10" (125 dense, 600 GB/s; not confirmed), "RTX A6000" (309.7 with sparsity, 768 GB/s; its NVLink
    # bridge joins two cards only, and is not counted), "RTX 6000 Ada" (1,457 FP8 with sparsity, so 364; 960 GB/s).
    _gpu("l4", "NVIDIA L4 24 GB", 121, (24, 300), (32, 1.5625), 0.60),
    _gpu("l40s", "NVIDIA L40S 48 GB", 362, (48, 864), (32, 6.25), 0.60),
    _gpu("a10", "NVIDIA A10 24 GB", 125, (24, 600), (32, 1.5625), 0.60),
    _gpu("rtx-a6000", "NVIDIA RTX A6000 48 GB", 154.8, (48, 768), (32, 0.15625), 0.60),
    _gpu("rtx-6000-ada", "NVIDIA RTX 6000 Ada 48 GB", 364, (48, 960), (32, 0.15625), 0.60),
    # GeForce cards halve the rate with float32 accumulation: 165.2 (4090; 330.3 with sparsity, 1,008 GB/s) and 209.5
    # (5090; a quarter of the 838 that are quoted with sparsity and float16 accumulation; 1,792 GB/s). RTX PRO 6000
    # Blackwell does not: an eighth of 4,000 TOPS in FP4 with sparsity; programs measured 458.
    _gpu("rtx-4090", "NVIDIA RTX 4090 24 GB", 165.2, (24, 1008), (32, 0.15625), 0.60),
    _gpu("rtx-5090", "NVIDIA RTX 5090 32 GB", 209.5, (32, 1792), (64, 0.15625), 0.60),
    _gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 96 GB", 500, (96, 1792), (64, 6.25), 0.60),
    # AMD data sheets: 1,307 TFLOP/s dense of MI300X and MI325X, 2,517 of MI355X (digests say 1.3 and 2.5 PFLOP/s); 5.3,
    # 6 and 8 TB/s. Infinity Fabric joins each pair of eight by one link of 128 GB/s (MI355X 153.6, not confirmed) both
    # ways, so a ring gets half of one; collectives over all seven are faster than this counts. Hosts: systems of AMD's
    # MLPerf submissions, 1.5 TiB (MI300X) and 3 TB (MI355X) per eight; that of MI325X is taken to be the MI300X's.
    _gpu("mi300x", "AMD MI300X 192 GB", 1307, (192, 5300), (64, 50), 0.35, host=(64, 190)),
    _gpu("mi325x", "AMD MI325X 256 GB", 1307, (256, 6000), (64, 50), 0.35, host=(64, 190)),
    _gpu("mi355x", "AMD MI355X 288 GB", 2517, (288, 8000), (76.8, 50), 0.30, host=(64, 375)),
    # TPU: FLOP/s, memory and links of v3, v4, v5e are those of table 2 of arXiv 2310.01889v4, from which its block
    # sizes follow (Google says 197 TFLOP/s of v5e, and 200 GB/s each way). v5p, v6e (Trillium) and v7 (Ironwood) are
    # those of Google Cloud's pages: 459, 918, 2,307 TFLOP/s; 95, 32, 192 GB; 2,765, 1,638, 7,380 GB/s; 1,200, 800,
    # 1,200 GB/s over all links, both ways. Not confirmed: the last bandwidths of v7, the memory bandwidth of v3 and v4,
    # the chips of a slice of v3. JAX shows a chip of v7 as two devices of 96 GB.
    _tpu("tpu-v3", "TPU v3", 123, (16, 900), 112, 1024),
    _tpu("tpu-v4", "TPU v4", 275, (32, 1228), 268, 4096),
    _tpu("tpu-v5e", "TPU v5e", 196, (16, 819), 186, 256),
    _tpu("tpu-v5p", "TPU v5p", 459, (95, 2765), 600, 8960),
    _tpu("tpu-v6e", "TPU v6e", 918, (32, 1638), 400, 256),
    _tpu("tpu-v7", "TPU v7", 2307, (192, 7380), 600, 9216),
)
DEVICES: Final = {device.name: device for device in _DEVICES}

# What people and libraries call them besides their names and titles; the second of a pair is the other device that the
# name could mean.
OTHER_NAMES: Final[dict[str, tuple[str, str]]] = {
    "a100": ("a100-80gb", "a100-40gb"),
    "h100": ("h100-80gb", ""),
    "b200-192gb": ("b200", ""),
    "b300-288gb": ("b300", ""),
    "gb300-288gb": ("gb300", ""),
    "a6000": ("rtx-a6000", ""),
    "rtx-6000": ("rtx-6000-ada", "rtx-pro-6000"),
    "6000-ada": ("rtx-6000-ada", ""),
    "pro-6000": ("rtx-pro-6000", ""),
    "4090": ("rtx-4090", ""),
    "5090": ("rtx-5090", ""),
    "v3": ("tpu-v3", ""),
    "v4": ("tpu-v4", ""),
    "v5e": ("tpu-v5e", ""),
    "v5litepod": ("tpu-v5e", ""),
    "tpu-v5-lite": ("tpu-v5e", ""),
    "v5p": ("tpu-v5p", ""),
    "v6e": ("tpu-v6e", ""),
    "tpu-v6-lite": ("tpu-v6e", ""),
    "trillium": ("tpu-v6e", ""),
    "tpu-trillium": ("tpu-v6e", ""),
    "v7": ("tpu-v7", ""),
    "v7x": ("tpu-v7", ""),
    "tpu-v7x": ("tpu-v7", ""),
    "tpu7x": ("tpu-v7", ""),
    "ironwood": ("tpu-v7", ""),
    "tpu-ironwood": ("tpu-v7", ""),
}
