"""Processes in Linux network namespaces of their own, and the links between them.

Linux, root, iproute2 and util-linux. The namespaces have no names: they, and the links into them, are gone as soon as
their processes are, and those end with this one however it ends.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from ringspan.torch.engine.transport.exchange import Exchange, TensorSpec

LINK: Final = "ring"  # the name of the end of a link, each in its own namespace


def why_not(*programs: str, trial: str) -> str | None:
    """What this machine lacks of some programs, and to run ``trial`` in a namespace of its own; None when it can."""
    missing = [name for name in ("ip", "unshare", *programs) if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2 and util-linux)"
    if os.geteuid():
        return "needs root, to make network namespaces"
    done = subprocess.run(
        [path("unshare"), "--net", "sh", "-c", trial], capture_output=True, text=True
    )
    return (
        f"cannot make such a network here: {done.stderr.strip()}"
        if done.returncode
        else None
    )


@contextmanager
def namespaced(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process in a network namespace of its own; it says a line when it is there."""
    full = [path("unshare"), "--net", *command]
    process = subprocess.Popen(
        full, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if not pipe(process.stdout).readline():
            raise SystemExit("a rank did not start; its message is above")
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def bridged(module: str, ranks: int) -> Iterator[list["subprocess.Popen[str]"]]:
    """Ranks of a benchmark, each in a namespace of its own, on one bridge; they live as long as this context."""
    with (
        tempfile.TemporaryDirectory(prefix="ringspan-ranks-") as folder,
        ExitStack() as stack,
    ):
        switch = stack.enter_context(namespaced(["sh", "-c", "echo here; exec cat"]))
        inside = "nsenter", "--net", "--target", str(switch.pid)
        run(*inside, "ip", "link", "add", "name", "switch", "type", "bridge")
        run(*inside, "ip", "link", "set", "switch", "up")
        processes = [
            stack.enter_context(namespaced(rank_command(module, rank, folder)))
            for rank in range(ranks)
        ]
        for rank, process in enumerate(processes):
            link((f"port{rank}", switch.pid), (LINK, process.pid))
            run(*inside, "ip", "link", "set", f"port{rank}", "master", "switch", "up")
        yield processes


def rank_command(module: str, rank: int, folder: str) -> list[str]:
    """What a benchmark starts itself with as one of its ranks."""
    return [sys.executable, "-m", module, "--rank", str(rank), folder]


def link(one: tuple[str, int], other: tuple[str, int]) -> None:
    """Join the namespaces of two processes: the name of either end of the link, and its process."""
    first, second = (["name", name, "netns", str(pid)] for name, pid in (one, other))
    run("ip", "link", "add", *first, "type", "veth", "peer", *second)


def ask(ranks: list["subprocess.Popen[str]"], question: Any) -> Any:
    """Ask every rank the same; what the first answers, when all have answered. Both are JSON."""
    for process in ranks:
        pipe(process.stdin).write(json.dumps(question) + "\n")
        pipe(process.stdin).flush()
    lines = [pipe(process.stdout).readline() for process in ranks]
    if not all(lines):
        raise SystemExit("a rank failed; its message is above")
    return json.loads(lines[0])


def serve(
    rank: int, ranks: int, folder: str, answer: Callable[[Any, dist.ProcessGroup], Any]
) -> None:
    """One rank of one thread: join the others over this end of the link and give ``answer(question, alone)``, where
    ``alone`` is a group of this rank only. It ends when the process that asks does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    print("here", flush=True)
    question = json.loads(sys.stdin.readline())
    threading.Thread(
        target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True
    ).start()
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", LINK)
    # A token bucket would cut larger segments up and send them out of order.
    run("ip", "link", "set", LINK, "gso_max_size", "16384", "up")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    # Each rank its own cores: woken by the network all the time, a scheduler may put ranks on one core.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank::ranks] or [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    print(json.dumps(answer(question, alone)), flush=True)


def swap(block: torch.Tensor, peer: int) -> None:
    """Trade a block with another rank."""
    exchange = Exchange(dist.group.WORLD, "a block and nothing else")
    exchange.post([(peer, block)], [(peer, TensorSpec.like(block))], 0)[0].wait()


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(
        [path(command[0]), *command[1:]], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: {done.stderr.strip()}")


def path(name: str) -> str:
    """Where a program is."""
    return shutil.which(name) or name


def pipe(end: Any) -> Any:
    """A pipe that was asked for."""
    assert end is not None
    return end
