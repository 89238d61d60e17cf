"""``ringspan demo``: the main job in a few minutes, and its report."""

import json
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.checks import check_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringspan.measure.bench.demo import DemoOptions

EPILOG = "Example: ringspan demo --steps 10 --length 4096"


def command(
    run: Annotated[str, typer.Option(help="Folder of the results; an earlier demo in it is replaced.")] = "runs/demo",
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the ring; on CUDA at most one per device.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a sequence.")] = 8192,
    layout: Annotated[str, typer.Option(help="zigzag, striped or contiguous.")] = "zigzag",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a 5M-parameter Llama on Python's own source over a ring, prove it equal to one process, measure memory."""
    from ringspan.core.messages.extras import require
    from ringspan.torch.runtime.forks import serve_forks

    check_folder("--run", Path(run))
    require("ringspan demo", "datasets")
    _say("importing PyTorch and transformers")
    # It gets ready while the next imports take their time.
    serve_forks("ringspan.train.loop", "torch.utils.tensorboard")

    from ringspan.cli.commands.train import train_rank
    from ringspan.cli.console import console
    from ringspan.core.geometry.layout import layout_name
    from ringspan.core.messages.units import shown_seconds
    from ringspan.measure.bench.demo import DemoOptions, measure_memory, training_config
    from ringspan.measure.bench.machine import describe_machine
    from ringspan.report.demo_page import write_report
    from ringspan.torch.runtime.launch import launch

    out = console(stderr=True)
    began = time.perf_counter()
    options = DemoOptions(run=run, ranks=ranks, steps=steps, length=length, layout=layout_name(layout))
    config = training_config(options)
    config.resolve_mesh(ranks)
    folder = _clear(Path(run))
    seconds: dict[str, float] = {}

    @contextmanager
    def part(name: str, title: str) -> "Iterator[None]":
        started = time.perf_counter()
        shown = f"{title} ({shown_seconds(started - began)} so far)" if seconds else title
        out.rule(shown, align="left") if out.is_terminal else out.print(shown)
        yield
        seconds[name] = time.perf_counter() - started

    with part("train", f"1  Train: {length:,} tokens per sequence over a ring of {ranks}"):
        trained = launch(train_rank, ranks, config)[0]
    with part("proof", "2  Prove: the same batch on one process and on the ring"):
        proof = launch(_prove_rank, ranks, trained.model, options, threads=1)[0]
    with part("memory", "3  Measure: activations that a rank holds on rings of 1, 2 and 4"):
        held = measure_memory(options, _say)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    settings = config.model.config_values()
    result: dict[str, Any] = {
        "command": "ringspan demo",
        "machine": describe_machine(),
        "model": {
            "type": settings["model_type"],
            "parameters": trained.facts["parameters"],
            "layers": settings["num_hidden_layers"],
            "hidden_size": settings["hidden_size"],
            "heads": settings["num_attention_heads"],
            "kv_heads": settings["num_key_value_heads"],
            "vocabulary": settings["vocab_size"],
        },
        "data": {
            "documents": trained.facts["documents"],
            "tokens": trained.facts["tokens"],
            "description": "source and documentation of the running Python",
        },
        "ranks": ranks,
        "sequence_length_tokens": length,
        "layout": options.layout,
        "dtype": config.model.dtype,
        "metrics": [line for line in lines if "loss" in line],
        "evaluation": [line for line in lines if "eval_loss" in line],
        "proof": proof,
        "memory": held,
        "seconds": seconds,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    write_report(result, folder / "report.html")
    if as_json:
        print(json.dumps(result))
    else:
        _summary(result, folder)


def _prove_rank(folder: str, options: "DemoOptions") -> dict[str, Any]:
    import torch.distributed as dist

    from ringspan.cli.progress import quiet
    from ringspan.measure.bench.demo import prove

    quiet()
    return prove(folder, options, _say if dist.get_rank() == 0 else lambda line: None)


def _say(line: str) -> None:
    """Print the next action with the time to standard error of any rank: a step may take a minute."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def _clear(folder: Path) -> Path:
    """Remove the output of an earlier demo, and nothing else."""
    if not (folder / "metrics.jsonl").exists():
        return folder
    for name in ("model", "tensorboard", "checkpoints", "watchdog", "tokenizer"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("run.json", "data.json", "exported", "metrics.jsonl", "result.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
    return folder


def _summary(result: dict[str, Any], folder: Path) -> None:
    from rich.table import Table

    from ringspan.cli.console import console

    first, last, proof = result["metrics"][0], result["metrics"][-1], result["proof"]
    worst = max(result["proof"]["gradients"], key=lambda row: row["relative_difference"])
    table = Table(title="ringspan demo", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("loss", f"{first['loss']:.3f} -> {last['loss']:.3f} in {last['step']} steps")
    for line in result["evaluation"][-1:]:
        table.add_row("held-out loss", f"{line['eval_loss']:.3f}")
    table.add_row(
        "speed",
        f"{last['tokens_per_second']:,.0f} tokens/s, {last['matmul_utilization']:.0%} of a matrix product's speed",
    )
    table.add_row("loss, one process", f"{proof['loss_one_process']:.7f}")
    table.add_row(f"loss, ring of {proof['ranks']}", f"{proof['loss_ring']:.7f}")
    table.add_row("difference", f"{proof['loss_relative_difference']:.1e} relative")
    table.add_row("worst gradient", f"{worst['relative_difference']:.1e} relative ({worst['name']})")
    errors = proof["worst_error"]
    table.add_row("against float64", f"ring {errors['ring']:.1e}, one process {errors['one_process']:.1e} at worst")
    for row in result["memory"]:
        table.add_row(
            f"activations, ring {row['ring']}",
            f"{row['activation_bytes'] / 1e6:.1f} MB per rank, {row['tokens_per_rank']:,} tokens each",
        )
    table.add_row("time", ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items()))
    table.add_row("report", str(folder / "report.html"))
    console().print(table)
