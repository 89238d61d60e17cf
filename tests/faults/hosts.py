"""Hosts on one machine: network and process namespaces of their own, and links between them that can be cut or held.

Needs Linux, root, iproute2 and util-linux; ``why_not`` names what is missing.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import namespaces

LINK = "ringspan0"
ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    """What this machine lacks to make hosts of namespaces; None when it can."""
    commands = (
        f"unshare --net --pid --fork ip link add name {LINK} type veth peer name other",
        f"ip link add name {LINK} type veth peer name other",
        "ip link add name switch type bridge",
        f"tc qdisc add dev {LINK} root {_held('1mbit')}",
    )
    return namespaces.why_not("nsenter", "tc", trial=" && ".join(commands))


def _held(rate: str) -> str:
    """A queue that sends at a rate, and drops what would wait longer than a while."""
    return f"tbf rate {rate} burst 32kb latency 400ms"


class Hosts:
    """Hosts on one switch, as many as ``logs``, that run a command under torchrun, a rank each, once entered."""

    def __init__(
        self, logs: Sequence[Path], command: list[str], environment: dict[str, str]
    ) -> None:
        self._logs, self._command, self._environment = logs, command, environment
        self._stack = ExitStack()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        switch = self._stack.enter_context(
            namespaces.namespaced(["sh", "-c", "echo here; exec cat"])
        )
        inside = "nsenter", "--net", "--target", str(switch.pid)
        namespaces.run(*inside, "ip", "link", "add", "switch", "type", "bridge")
        namespaces.run(*inside, "ip", "link", "set", "switch", "up")
        self.processes = [self._started(host) for host in range(len(self._logs))]
        for host, process in enumerate(self.processes):
            end = f"port{host}"
            namespaces.link((LINK, self._namespace(process)), (end, switch.pid))
            namespaces.run(*inside, "ip", "link", "set", end, "master", "switch", "up")
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()
        return self

    def _started(self, host: int) -> "subprocess.Popen[bytes]":
        """A host's process, which waits for a line before it starts the command."""
        nodes = ["--nnodes", str(len(self._logs)), "--node-rank", str(host)]
        address = ["--master-addr", "10.0.0.1", "--master-port", "29517"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, *address]
        script = (
            f"read go && ip link set lo up && ip address add 10.0.0.{host + 1}/24 dev {LINK} && "
            # A token bucket would cut larger segments up and send them out of order.
            f'ip link set {LINK} gso_max_size 16384 up && exec "$@"'
        )
        unshare = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
        shell = [*unshare, "--mount-proc", "sh", "-c", script, "sh"]
        with self._logs[host].open("ab") as log:
            process = subprocess.Popen(
                [*shell, *torchrun, "--nproc-per-node", "1", *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": LINK,
                    "OMP_NUM_THREADS": "1",
                    **self._environment,
                },
                cwd=ROOT,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def cut(self, host: int = 1) -> None:
        """A host's link goes down; no side is told."""
        self._in(host, "ip", "link", "set", LINK, "down")

    def terminate(self, host: int) -> None:
        """Tell a host's torchrun to end, as a machine that is shut down does."""
        outer = self.processes[host].pid
        inside = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        os.kill(int(inside[0]), signal.SIGTERM)

    def hold(self, host: int, rate: str) -> None:
        """Hold what a host sends to a rate."""
        self._in(host, "tc", "qdisc", "add", "dev", LINK, "root", *_held(rate).split())

    def release(self, host: int) -> None:
        """Let a host send as fast as it can again."""
        self._in(host, "tc", "qdisc", "delete", "dev", LINK, "root")

    def _in(self, host: int, *command: str) -> None:
        """Run a command in a host's network."""
        process = str(self.processes[host].pid)
        namespaces.run("nsenter", "--net", "--target", process, *command)

    @staticmethod
    def _namespace(process: "subprocess.Popen[bytes]") -> int:
        """The process, once it is in a network of its own."""
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink(
            "/proc/self/ns/net"
        ):
            if process.poll() is not None:
                raise RuntimeError("a host did not start")
        return process.pid
