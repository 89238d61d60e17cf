"""How a run shows itself: a progress bar on a terminal, a line a step elsewhere."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ringspan.train.loop import Observer
from ringspan.train.metrics import StepMetrics


def quiet() -> None:
    """Silence what every rank would say: progress bars and warnings of the libraries."""
    import datasets

    logging.getLogger("ringspan").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def watched(steps: int) -> Iterator[Observer]:
    """An observer that shows a run of this many steps on the standard error stream."""
    console = Console(stderr=True, highlight=False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not console.is_terminal:
        import datasets

        datasets.disable_progress_bars()
        yield Observer(_started(console), _line(steps), _evaluated(console), _noticed(console))
        return
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TextColumn("/"), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("starting", total=steps)

        def stepped(metrics: StepMetrics) -> None:
            progress.update(task, completed=metrics.step, description=describe(metrics))

        yield Observer(_started(console), stepped, _evaluated(progress.console), _noticed(progress.console))


def describe(metrics: StepMetrics) -> str:
    """Loss, speed, share of the measured peak and memory in a line."""
    return (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  MFU {metrics.mfu:.0%}  "
        f"peak {metrics.peak_bytes / 1e9:.2f} GB a rank"
    )


def _started(console: Console) -> Any:
    def show(facts: dict[str, Any]) -> None:
        console.print(
            f"{facts['parameters'] / 1e6:.1f}M parameters on a ring of {facts['ring']}"
            + (f" x {facts['replicate']} replicas" if facts["replicate"] > 1 else "")
            + (f", heads split over {facts['tp']}" if facts["tp"] > 1 else "")
            + f", {facts['sequence_length_tokens']:,} tokens a sequence, {facts['tokens_per_step']:,} a step; "
            f"{facts['tokens']:,} tokens in {facts['documents']:,} documents"
        )

    return show


def _line(steps: int) -> Any:
    def show(metrics: StepMetrics) -> None:
        print(f"step {metrics.step}/{steps}  {describe(metrics)}", file=sys.stderr, flush=True)

    return show


def _evaluated(console: Console) -> Any:
    return lambda step, loss: console.print(f"step {step}  evaluation loss {loss:.4f}")


def _noticed(console: Console) -> Any:
    return lambda line: console.print(line, markup=False, soft_wrap=True)
