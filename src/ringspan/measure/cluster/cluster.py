"""Facts that a job's ranks learn about each other before it starts: versions, links, clocks, open ports."""

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.cuda import nccl

from ringspan.core.messages.units import shown_bandwidth
from ringspan.measure.machine import package_version
from ringspan.torch.engine.transport.clock import synchronize
from ringspan.torch.engine.transport.collectives import gather
from ringspan.torch.engine.transport.exchange import Exchange, TensorSpec
from ringspan.torch.runtime.launch import local_device

PACKAGES: Final = ("ringspan", "torch", "transformers", "numpy")
# These exchange messages with themselves on other ranks, so their versions must match.
_MUST_BE_EQUAL: Final = (
    "ringspan",
    "torch",
    "transformers",
    "nccl",
)
_MESSAGE_BYTES: Final = {"cpu": 16 << 20, "cuda": 256 << 20}
_ROUNDS: Final = 3
_SLOW_LINK: Final = 0.5  # a link is slow below this share of the median bandwidth
_CLOCK_SECONDS: Final = 1.0
_LISTENING: Final = "0A"  # TCP_LISTEN in the kernel's include/net/tcp_states.h


@dataclass(frozen=True)
class Problem:
    """A fault and its remedy; one that ``stops`` keeps training from starting, or from being right."""

    what: str
    remedy: str
    stops: bool = False


def versions() -> dict[str, str | None]:
    nccl_version = (
        nccl.version()
        if torch.cuda.is_available() and dist.is_nccl_available()
        else None
    )
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version)) if nccl_version else None,
    }


def examine_ranks(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return all ranks' facts, links and clocks, on every rank; the bandwidth is the slowest's when all send."""
    ranks, facts = dist.get_world_size(group), gather(_facts(), group)
    offsets, uncertainty = clock_offsets(group)
    return {
        "ranks": facts,
        "clock_offset_seconds": offsets,
        "clock_uncertainty_seconds": uncertainty,
        "bandwidth_bytes_per_second": min(_transfer_rates(group, range(ranks), "ring"))
        if ranks > 1
        else None,
        "links": [
            {"from": sender, "to": (sender + 1) % ranks, "bytes_per_second": rate}
            for sender, rate in enumerate(_link_rates(group))
        ],
    }


def _facts() -> dict[str, Any]:
    device = local_device()
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "cpu",
        "versions": versions(),
        "listens": listening(os.getpid()),
        "launcher_listens": listening(os.getppid()),
    }


def clock_offsets(group: dist.ProcessGroup) -> tuple[list[float], float]:
    """Return the seconds that each rank's clock is ahead of the first's, and their error."""
    # The clocks are read within a round, so the shortest round bounds their error best.
    best, error = [0.0] * dist.get_world_size(group), float("inf")
    for _ in range(10):
        dist.barrier(group)
        now = torch.tensor(time.time(), dtype=torch.float64, device=local_device())
        clocks = [torch.empty_like(now) for _ in best]
        dist.all_gather(clocks, now, group=group)
        # all_gather returns only after every rank has read its clock, so readings are at most ``took`` apart.
        took = torch.tensor(
            time.time() - float(now), dtype=torch.float64, device=now.device
        )
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
        if float(took) < error:
            best, error = [float(clock - clocks[0]) for clock in clocks], float(took)
    return best, error


def _link_rates(group: dist.ProcessGroup) -> list[float]:
    """Measure the bytes/s of each link from a rank to the next while its neighbouring links are idle."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return []
    rates = [0.0] * ranks
    # In an odd ring the last link gets a turn of its own.
    odd = ranks - 1 if ranks % 2 else ranks
    for turn, senders in enumerate(
        (range(0, odd, 2), range(1, odd, 2), range(odd, ranks))
    ):
        if senders:
            for rank, rate in enumerate(
                _transfer_rates(group, senders, f"turn {turn}")
            ):
                if (rank - 1) % ranks in senders:
                    rates[(rank - 1) % ranks] = rate
    return rates


def _transfer_rates(
    group: dist.ProcessGroup, senders: Iterable[int], name: str
) -> list[float]:
    """Return each rank's best bytes/s over a few rounds when ``senders`` send a block to the next."""
    rank, ranks, device = (
        dist.get_rank(group),
        dist.get_world_size(group),
        local_device(),
    )
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    block = torch.zeros(_MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
    # The name includes the turn, so that a late rank does not receive another turn's block.
    exchange, best = Exchange(group, f"doctor {name}"), float("inf")
    for message in range(_ROUNDS + 1):
        dist.barrier(group)
        synchronize(device)
        started = time.perf_counter()
        sends = [(after, block)] if rank in senders else []
        receives = [(before, TensorSpec.like(block))] if before in senders else []
        exchange.post(sends, receives, message)[0].wait()
        synchronize(device)
        if message:  # the first round only opens connections
            best = min(best, time.perf_counter() - started)
    return gather(block.nbytes / best, group)


def listening(process: int) -> list[str] | None:
    """Return ``host:port`` of this user's listening TCP sockets; None if unknown."""
    folder = Path("/proc", str(process))
    try:
        targets = [
            os.readlink(entry)
            for entry in (folder / "fd").iterdir()
            if entry.is_symlink()
        ]
        tables = [(folder / "net" / name).read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return None
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    return sorted(
        address
        for table in tables
        for address, inode in listeners(table)
        if inode in inodes
    )


def listeners(table: str) -> list[tuple[str, str]]:
    """Return (address, inode) of listening sockets in the text of ``/proc/net/tcp`` or ``tcp6``."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return [
        (_address(row[1]), row[9])
        for row in rows
        if len(row) > 9 and row[3] == _LISTENING
    ]


def _address(text: str) -> str:
    """Decode ``0100007F:1F90`` to ``127.0.0.1:8080``: little-endian 32-bit words."""
    host, port = text.split(":")
    packed = b"".join(
        bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)
    )
    name = socket.inet_ntop(
        socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed
    )
    return f"[{name}]:{int(port, 16)}" if ":" in name else f"{name}:{int(port, 16)}"


def problems_between(examined: dict[str, Any]) -> list[Problem]:
    """Return the problems that show only by comparing ranks: versions, devices, clocks, links, open ports."""
    facts = examined["ranks"]
    found = [
        problem for name in facts[0]["versions"] for problem in _odd_ones(facts, name)
    ]
    devices = Counter(fact["device"] for fact in facts)
    usual = devices.most_common(1)[0][0]
    found += [
        Problem(
            f"rank {rank} on {fact['host']} has {fact['device']}, most have {usual}",
            "a ring is as slow as its slowest rank: give it devices of one kind",
        )
        for rank, fact in enumerate(facts)
        if fact["device"] != usual
    ]
    error = examined["clock_uncertainty_seconds"]
    found += [
        Problem(
            f"the clock of rank {rank} on {facts[rank]['host']} is {abs(offset):.1f} s "
            f"{'ahead of' if offset > 0 else 'behind'} that of rank 0",
            "let both hosts keep time by NTP; logs and checkpoints are dated by these clocks",
        )
        for rank, offset in enumerate(examined["clock_offset_seconds"])
        if abs(offset) - error > _CLOCK_SECONDS
    ]
    return [*found, *_slow_links(examined["links"], facts), *_open_ports(facts)]


def _odd_ones(facts: list[dict[str, Any]], name: str) -> list[Problem]:
    """Return a problem for each rank whose version of a package differs from the most common one."""
    values = [fact["versions"][name] for fact in facts]
    usual = Counter(values).most_common(1)[0][0]
    return [
        Problem(
            f"rank {rank} on {fact['host']} has {name} {value}, most have {usual}",
            f"install the same {name} on all hosts",
            stops=name in _MUST_BE_EQUAL,
        )
        for rank, (fact, value) in enumerate(zip(facts, values, strict=True))
        if value != usual
    ]


def _slow_links(
    links: list[dict[str, Any]], facts: list[dict[str, Any]]
) -> list[Problem]:
    """Return a problem for each link below half of the median bandwidth; none if there are fewer than three links."""
    if len(links) < 3:
        return []
    usual = median(link["bytes_per_second"] for link in links)
    return [
        Problem(
            f"the link from rank {link['from']} ({facts[link['from']]['host']}) to rank {link['to']} "
            f"({facts[link['to']]['host']}) carries {shown_bandwidth(link['bytes_per_second'])}, the median "
            f"link {shown_bandwidth(usual)}",
            "a ring is as fast as its slowest link: look at that cable, or use a double ring between nodes",
        )
        for link in links
        if link["bytes_per_second"] < _SLOW_LINK * usual
    ]


def _open_ports(facts: list[dict[str, Any]]) -> list[Problem]:
    """Return problems of ranks, or their launchers, that any host may connect to."""
    found: dict[tuple[str, str], Problem] = {}
    for rank, fact in enumerate(facts):
        for who, listens in (
            (f"rank {rank}", "listens"),
            (f"the launcher of rank {rank}", "launcher_listens"),
        ):
            for address in fact[listens] or ():
                if address.startswith(("0.0.0.0:", "[::]:")):
                    found.setdefault(
                        (fact["host"], address),
                        Problem(
                            f"{who} on {fact['host']} listens on {address}, that is on every network of its host",
                            "let a firewall admit the job's hosts alone: whoever connects can disturb the job",
                        ),
                    )
    return list(found.values())
