"""``ringspan train``: from a TOML file to a fine-tuned Hugging Face folder."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringspan.train.config.tables import TrainConfig
    from ringspan.train.result import TrainResult

EPILOG = (
    "Example: ringspan train examples/finetune.toml --nproc 4 steps=10. "
    "On a cluster: torchrun --nnodes 2 --nproc-per-node 8 -m ringspan train examples/finetune.toml"
)


def command(
    config: Annotated[Path, typer.Argument(help="TOML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, such as optimizer.learning_rate=1e-4.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Processes to start on this machine; default: one a CUDA device, else one. Not under torchrun."
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(help="Start all processes again, up to so often, when one dies. Not under torchrun.", min=0),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fine-tune (or train from scratch) a causal language model on long sequences over a ring of processes.

    A run that is there already goes on from its newest valid checkpoint. SIGTERM, SIGINT and SIGUSR1 save and end with
    exit code 75.
    """
    from ringspan.train.config.tables import load_config

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
        print(f"stopped by {result.stopped_by} and saved after step {result.steps}; the same command goes on")
        return
    print(f"loss {result.loss:.4f} after {result.steps} steps", end="")
    print(f", {result.eval_loss:.4f} on held-out text" if result.eval_loss is not None else "")
    print(f"metrics  {result.run}/metrics.jsonl\nmodel    {result.model}")


def run(settings: "TrainConfig", nproc: int | None, max_restarts: int = 0) -> "tuple[TrainResult, bool]":
    """Train in the ranks that torchrun started, or in new local ones; the result, and whether this is rank 0."""
    from ringspan.core.errors import ConfigError
    from ringspan.torch.runtime.forks import serve_forks

    settings.require_extras()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        for option, given in (("--nproc", nproc), ("--max-restarts", max_restarts or None)):
            if given is not None:
                raise ConfigError(f"{option} {given} under torchrun, which has started the processes; leave it out")
        return _run_here(settings)
    if nproc is None:
        import torch

        nproc = max(1, torch.cuda.device_count())
    elif nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one process is needed")
    settings.resolve_mesh(nproc)  # refuse here what every rank would
    thrift = settings.memory.offload != "none"  # who offloads would rather wait for memory than run out of it
    if not thrift:
        # It gets ready while the next imports take their time.
        serve_forks("ringspan.train.loop", "torch.utils.tensorboard")

    from ringspan.torch.runtime.launch import launch
    from ringspan.train.config.paths import refuse_missing
    from ringspan.train.lock import RunLock
    from ringspan.train.model import load_model_config
    from ringspan.train.resume import read_record

    refuse_missing(settings.data.paths)
    with RunLock(Path(settings.run)) as lock:  # for its refusal: rank 0 takes it for itself
        lock.take()
    read_record(settings)
    load_model_config(settings)
    results = launch(train_rank, nproc, settings, max_restarts=max_restarts, forward_signals=True, is_thrifty=thrift)
    return results[0], True


def _run_here(settings: "TrainConfig") -> "tuple[TrainResult, bool]":
    """As one of the ranks that torchrun started."""
    import torch.distributed as dist

    from ringspan.torch.runtime.launch import join

    join()
    try:
        return train_rank(settings), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def train_rank(settings: "TrainConfig") -> "TrainResult":
    """One rank's part of the run, with a progress bar on rank 0, in a process that ends with it."""
    import torch.distributed as dist

    from ringspan.cli.progress import quiet, watched
    from ringspan.train.loop import train

    if dist.get_rank() != 0:
        quiet()
        return train(settings, then_exit=True)
    with watched(settings.steps) as observer:
        return train(settings, observer, then_exit=True)
