"""Progress of a run: a bar on a terminal, a line per step elsewhere."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ringspan.cli.console import console, hush, say
from ringspan.train.loop import Observer
from ringspan.train.metrics import StepMetrics

# characters of a line that the numbers of the step and both times take
_BESIDE: Final = 36
_WIDE: Final = 140  # least width of a terminal with room for a bar


def quiet() -> None:
    import datasets

    hush()
    logging.getLogger("ringspan").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


@contextmanager
def watched(steps: int) -> Iterator[Observer]:
    """Yield an observer of a run that shows a bar on a terminal, and prints a line per step elsewhere."""
    out = console(stderr=True)
    hush()
    started = partial(_show_start, out)
    noticed = partial(out.print, markup=False, soft_wrap=True)

    def evaluated(step: int, loss: float) -> None:
        out.print(f"step {step}  evaluation loss {loss:.4f}")

    if not out.is_terminal:
        import datasets

        datasets.disable_progress_bars()
        yield Observer(
            noticed,
            started,
            lambda each: say(f"step {each.step}/{steps}  {describe(each)}"),
            evaluated,
            noticed,
        )
        return
    columns = [
        TextColumn("step"),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    ]
    if out.width >= _WIDE:
        columns[2:2] = [BarColumn()]
    with Progress(
        *columns, TextColumn("/"), TimeRemainingColumn(), console=out
    ) as progress:
        task = progress.add_task("starting", total=steps)

        def doing(what: str) -> None:
            progress.update(task, description=what)

        def stepped(metrics: StepMetrics) -> None:
            progress.update(
                task,
                completed=metrics.step,
                description=describe(metrics, out.width - _BESIDE),
            )

        yield Observer(doing, started, stepped, evaluated, noticed)


def describe(metrics: StepMetrics, width: int | None = None) -> str:
    """Format loss, speed, its share of matrix products' speed, and memory in a line.

    Drop the last ones that exceed ``width``.
    """
    parts = [
        f"loss {metrics.loss:.4f}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        f"matmul {metrics.matmul_utilization:.0%}",
        f"peak {metrics.peak_bytes / 1e9:.2f} GB per rank",
    ]
    while width is not None and len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def _show_start(out: Console, facts: dict[str, Any]) -> None:
    out.print(
        f"{facts['parameters'] / 1e6:.1f}M parameters on a ring of {facts['ring']}"
        + (f" x {facts['replicate']} replicas" if facts["replicate"] > 1 else "")
        + (f", heads split over {facts['tp']}" if facts["tp"] > 1 else "")
        + f", {facts['sequence_length_tokens']:,} tokens per sequence, {facts['tokens_per_step']:,} per step; "
        f"{facts['tokens']:,} tokens in {facts['documents']:,} document"
        + ("s" if facts["documents"] != 1 else "")
    )
    out.print(
        "matmul: the model's FLOP/s, of those that matrix products alone reached at the start"
    )
