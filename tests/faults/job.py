"""A real training job whose ranks can be struck: ``python -m tests.faults.job CONFIG NPROC MAX_RESTARTS``.

It is what ``ringspan train`` does, and each rank first leaves its process id in the run's parent folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringspan.core.errors import RingspanError
from tests.train.runs import training_file, write_text


def rank_of(config: Any, pids: str) -> Any:
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    path = Path(pids, f"attempt-{attempt}-rank-{rank}.pid")
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    from ringspan.cli.commands.train import train_rank

    return train_rank(config)


def main(path: str, nproc: str, max_restarts: str) -> None:
    """Launch the ranks; exit as ``ringspan train`` does."""
    from ringspan.torch.runtime.forks import serve_forks

    serve_forks("ringspan.train.loop")

    from ringspan.torch.runtime.launch import launch
    from ringspan.train.config.load import load_config
    from ringspan.train.signals import EXIT_STOPPED

    pids = Path(path).with_suffix(".pids")
    pids.mkdir(exist_ok=True)
    restarts = int(max_restarts)
    try:
        result = launch(
            rank_of,
            int(nproc),
            load_config(path),
            str(pids),
            max_restarts=restarts,
            forward_signals=True,
            threads=1,
        )[0]
    except RingspanError as error:
        print(f"ringspan: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        print(f"ringspan: {error}", file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"steps": result.steps, "stopped_by": result.stopped_by}))
    sys.exit(EXIT_STOPPED if result.stopped_by else 0)


class Job:
    """A job in a folder of its own, started and struck by a test. The text is the same for all jobs of a parent."""

    def __init__(
        self,
        parent: Path,
        name: str,
        *,
        nproc: int = 2,
        steps: int = 60,
        max_restarts: int = 0,
        every_steps: int = 5,
        min_seconds: float = 3.0,
        silence_seconds: float = 60.0,
        optimizer: str = "",
        checkpoints: str = "",
    ) -> None:
        self.run, self.nproc, self.max_restarts = parent / name, nproc, max_restarts
        self.config = parent / f"{name}.toml"
        if not (parent / "text").exists():
            write_text(parent)
        self.config.write_text(
            f"{training_file(parent, name, steps)}{optimizer}\n[checkpoints]\nevery_steps = {every_steps}\nkeep = 9\n"
            f"{checkpoints}"
            f"[watchdog]\nmin_seconds = {min_seconds}\nsilence_seconds = {silence_seconds}\n"
        )
        self.pids = self.config.with_suffix(".pids")
        self.log = parent / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, nproc: int | None = None, command: list[str] | None = None
    ) -> "Job":
        for path in self.pids.glob("*") if self.pids.exists() else ():
            path.unlink()
        self.nproc = nproc or self.nproc
        if command is None:
            command = [
                "tests.faults.job",
                str(self.config),
                str(self.nproc),
                str(self.max_restarts),
            ]
        environment = {
            **os.environ,
            "HF_DATASETS_CACHE": str(self.run.parent / "cache"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.DEVNULL,
            stderr=self.log.open("ab"),
            env=environment,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        return self

    def wait(self, seconds: float = 120) -> int:
        """Its exit code; it and all its ranks are gone after that."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        finally:
            self.end()

    def end(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def lines(self) -> list[dict[str, Any]]:
        try:
            text = (self.run / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [
            json.loads(line)
            for line in text.splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def last_step(self) -> int:
        lines = self.lines()
        return lines[-1]["step"] if lines else 0

    def curve(self) -> dict[int, tuple[float, float]]:
        return {
            line["step"]: (line["loss"], line["grad_norm"])
            for line in self.lines()
            if "loss" in line
        }

    def pid(self, rank: int, attempt: int = 0, seconds: float = 60) -> int:
        path = self.pids / f"attempt-{attempt}-rank-{rank}.pid"
        self.until(path.exists, seconds, f"rank {rank} of attempt {attempt}")
        return int(path.read_text())

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait for a condition; the seconds it took."""
        started = time.monotonic()
        while True:
            # before the look at what it left
            has_ended = self.process is None or self.process.poll() is not None
            waited = time.monotonic() - started
            if condition():
                return waited
            if waited > seconds or has_ended:
                raise TimeoutError(f"no {what} after {waited:.1f} s; {self.tail()}")
            time.sleep(0.005)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        return self.text()[-2000:]

    def newest(self) -> int:
        return newest_step(self.run / "checkpoints")


def uninterrupted(parent: Path, steps: int, nproc: int = 2, **options: Any) -> Job:
    """A run that nothing happens to, finished; made once in a folder."""
    job = Job(
        parent, f"uninterrupted-{steps}-{nproc}", nproc=nproc, steps=steps, **options
    )
    if not (job.run / "model").exists():
        code = job.start().wait(600)
        assert code == 0, job.tail()
    return job


def newest_step(checkpoints: Path) -> int:
    """The step of the newest finished checkpoint in a folder of them; 0 of none."""
    return max(
        (int(p.name[5:]) for p in checkpoints.glob("step_*") if p.name[5:].isdecimal()),
        default=0,
    )


def is_running(pid: int) -> bool:
    """True until a process is gone or only waits for its parent to notice."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            not in "ZX"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
