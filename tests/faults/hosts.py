"""Two hosts on one machine: network and process namespaces of their own, and a link between them that can be cut.

Needs Linux, root, iproute2 and util-linux; ``why_not`` names what is missing.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import namespaces

LINK = "ringspan0"
ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    """What this machine lacks to make hosts of namespaces; None when it can."""
    trial = (
        f"unshare --net --pid --fork ip link add name {LINK} type veth peer name other"
    )
    return namespaces.why_not("nsenter", trial=trial)


class Hosts:
    """Both hosts run the same command under torchrun, a rank each; entered, they are joined and have started it."""

    def __init__(
        self, logs: tuple[Path, Path], command: list[str], environment: dict[str, str]
    ) -> None:
        self._logs, self._command, self._environment = logs, command, environment
        self._stack = ExitStack()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        with ExitStack() as stack:
            for rank, log in enumerate(self._logs):
                torchrun = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    "2",
                    "--nproc-per-node",
                    "1",
                ]
                torchrun += [
                    "--node-rank",
                    str(rank),
                    "--master-addr",
                    "10.0.0.1",
                    "--master-port",
                    "29517",
                ]
                script = (
                    f"read go && ip link set lo up && ip address add 10.0.0.{rank + 1}/24 dev {LINK} && "
                    f'ip link set {LINK} up && exec "$@"'
                )
                unshare = [
                    "unshare",
                    "--net",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                ]
                process = subprocess.Popen(
                    [*unshare, "sh", "-c", script, "sh", *torchrun, *self._command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=stack.enter_context(log.open("ab")),
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
                self.processes.append(process)
            one, other = (
                (LINK, self._namespace(process)) for process in self.processes
            )
            namespaces.link(one, other)
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
                process.stdin.close()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def cut(self) -> None:
        """The link goes down; neither side is told."""
        namespaces.run(
            "nsenter",
            "--net",
            "--target",
            str(self.processes[1].pid),
            "ip",
            "link",
            "set",
            LINK,
            "down",
        )

    @staticmethod
    def _namespace(process: "subprocess.Popen[bytes]") -> int:
        """The process, once it is in a network of its own."""
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink(
            "/proc/self/ns/net"
        ):
            if process.poll() is not None:
                raise RuntimeError("a host did not start")
        return process.pid
