"""A run's metrics: a line per step in metrics.jsonl and TensorBoard."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringspan.core.files.lines import Lines
from ringspan.core.messages.extras import installed, remedy


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step of the whole run; ``matmul_utilization`` is model FLOP/s over all ranks' ``measure_flops``, not MFU."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    matmul_utilization: float
    peak_bytes: int
    seconds: float
    # divergence of a model's index; None if it does not learn
    index_loss: float | None = None


class MetricsWriter:
    """Writer of ``metrics.jsonl``, flushed per line, and of TensorBoard events if installed.

    A full disk stops neither this nor the run: each method that writes returns a notice when it begins to fail.
    """

    notice: str | None = None  # notice of what is not written, and how to enable it

    def __init__(self, run: Path, after_step: int = 0) -> None:
        """Continue after a step; drop later lines, left by a run that ended without saving."""
        self._path = run / "metrics.jsonl"
        self._board = None
        if installed("tensorboard"):
            # Imported here because it takes as long as all other imports together.
            from torch.utils.tensorboard import (
                SummaryWriter,
            )

            self._board = SummaryWriter(
                str(run / "tensorboard"),
                purge_step=after_step + 1 if after_step else None,
            )
        else:
            self.notice = f"metrics.jsonl is written, TensorBoard files are not: they need {remedy('tensorboard')}"
        self._open(after_step)

    def _open(self, after_step: int) -> None:
        kept = b"".join(_lines_until(self._path, after_step))
        scratch = self._path.with_suffix(".tmp")
        scratch.write_bytes(kept)
        scratch.replace(self._path)
        self._lines = Lines(self._path)

    def rewind(self, after_step: int) -> None:
        self._lines.close()
        self._open(after_step)

    def step(self, metrics: StepMetrics) -> str | None:
        values = asdict(metrics)
        return self._write(
            metrics.step,
            {name: value for name, value in values.items() if value is not None},
        )

    def evaluation(self, step: int, loss: float) -> str | None:
        return self._write(step, {"step": step, "eval_loss": loss})

    def speed(self, step: int, compared: dict[str, float]) -> str | None:
        """Write what a window of steps says of the ranks' speed."""
        return self._write(step, {"step": step, **compared})

    def close(self) -> None:
        self._lines.close()
        self._end_board()

    def _write(self, step: int, values: dict[str, Any]) -> str | None:
        # A step that was not finite is null: NaN is not JSON.
        values = {
            name: value if math.isfinite(value) else None
            for name, value in values.items()
        }
        notice = self._lines.add(json.dumps(values))
        try:
            for name, value in values.items():
                if self._board and name != "step" and value is not None:
                    self._board.add_scalar(name, value, step)
        # TensorBoard's own thread has failed to write earlier values.
        except OSError as error:
            self._end_board()
            return notice or f"TensorBoard files are no longer written: {error}"
        return notice

    def _end_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with suppress(OSError):
                board.close()


def _lines_until(path: Path, last_step: int) -> Iterator[bytes]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                return
        except (ValueError, KeyError, TypeError):
            return
        yield line
