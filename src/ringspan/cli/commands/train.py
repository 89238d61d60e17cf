"""``ringspan train``: from a TOML file to a fine-tuned Hugging Face folder."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspan.cli.checks import AsJson, Nproc, on_ranks, refuse_under_torchrun
from ringspan.torch.runtime.environment import is_rank

if TYPE_CHECKING:
    from ringspan.train.config.tables import TrainConfig
    from ringspan.train.run_folder.record import TrainResult

EPILOG = (
    "Example: ringspan train examples/finetune.toml --nproc 4 steps=10. "
    "On a cluster: torchrun --nnodes 2 --nproc-per-node 8 -m ringspan train examples/finetune.toml"
)


def command(
    config: Annotated[
        Path, typer.Argument(help="TOML file of the run.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings as key=value, such as optimizer.learning_rate=1e-4."
        ),
    ] = None,
    nproc: Nproc = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Restart all processes if one dies, at most N times. Not under torchrun.",
            min=0,
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Fine-tune (or train from scratch) a causal language model on long sequences over a ring of processes.

    Resumes an existing run from its newest valid checkpoint. SIGTERM, SIGINT and SIGUSR1 save and exit with code 75.
    """
    from ringspan.train.config.load import load_config

    settings = load_config(config, overrides or [])
    result, is_first = run(settings, nproc, max_restarts)
    if is_first:
        _show(result, as_json)
    if result.stopped_by:
        from ringspan.train.signals import EXIT_STOPPED

        raise typer.Exit(EXIT_STOPPED)


def _show(result: "TrainResult", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)))
        return
    if result.stopped_by:
        print(
            f"stopped by {result.stopped_by} and saved after step {result.steps}; run the same command again to resume"
        )
        return
    print(f"loss {result.loss:.4f} after {result.steps} steps", end="")
    print(
        f", {result.eval_loss:.4f} on held-out text"
        if result.eval_loss is not None
        else ""
    )
    print(f"metrics  {result.run}/metrics.jsonl\nmodel    {result.model}")


def run(
    settings: "TrainConfig", nproc: int | None, max_restarts: int = 0
) -> "tuple[TrainResult, bool]":
    """Train in torchrun's ranks or in new ones; return the result, and True on rank 0."""
    from ringspan.train.run_folder.record import RunLock, check_run

    check_run(settings)
    if is_rank():
        refuse_under_torchrun(max_restarts=max_restarts or None)
    else:
        with RunLock(
            Path(settings.run)
        ) as lock:  # only to refuse a run in use; rank 0 takes the lock itself
            lock.take()
    _spare_memory()

    def arguments() -> "tuple[TrainConfig]":
        from ringspan.train.model import load_model_config

        if not is_rank():  # once, before ranks start that would all raise the same
            load_model_config(settings)
        return (settings,)

    # A run that offloads prefers slower allocation to running out of memory.
    thrift = settings.memory.offload != "none"
    forks = () if thrift else ("ringspan.train.loop", "torch.utils.tensorboard")
    return on_ranks(
        train_rank,
        arguments,
        nproc,
        settings.resolve_mesh,
        forks=forks,
        max_restarts=max_restarts,
        forward_signals=True,
        is_thrifty=thrift,
    )


def _spare_memory() -> None:
    """Let CUDA's allocator grow its segments, which wastes less, unless the user has configured it."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def train_rank(settings: "TrainConfig") -> "TrainResult":
    """Run a rank's part, with a progress bar on rank 0, in a process that ends with the run."""
    import torch.distributed as dist

    from ringspan.cli.progress import quiet, watched
    from ringspan.train.loop import train

    if dist.get_rank() != 0:
        quiet()
        return train(settings, then_exit=True)
    with watched(settings.steps) as observer:
        return train(settings, observer, then_exit=True)
