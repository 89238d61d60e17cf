"""``ringspan demo``: the main job in a few minutes, and its report."""

import json
import shlex
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.checks import AsJson, check_folder
from ringspan.cli.console import console, facts
from ringspan.core.messages.extras import require
from ringspan.core.messages.units import shown_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringspan.train.demo import DemoOptions

EPILOG = "Example: ringspan demo --steps 10 --length 4096"


def command(
    run: Annotated[
        str, typer.Option(help="Folder of the results; replaces an earlier demo in it.")
    ] = "runs/demo",
    ranks: Annotated[
        int,
        typer.Option(
            min=1, help="Processes in the ring; on CUDA at most one per device."
        ),
    ] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a sequence.")] = 8192,
    layout: Annotated[
        str, typer.Option(help="zigzag, striped or contiguous.")
    ] = "zigzag",
    as_json: AsJson = False,
) -> None:
    """Train a 5M-parameter Llama on Python's own source over a ring, prove it equal to one process, measure memory."""
    from ringspan.torch.runtime.forks import serve_forks

    check_folder("--run", Path(run))
    require("ringspan demo", "datasets")
    _say("importing PyTorch and transformers")
    # It starts while the next imports run.
    serve_forks("ringspan.train.loop", "torch.utils.tensorboard")

    from ringspan.cli.commands.train import train_rank
    from ringspan.core.geometry.layout import layout_name
    from ringspan.measure.machine import describe_machine
    from ringspan.report.demo_page import write_report
    from ringspan.torch.runtime.launch import launch
    from ringspan.train.demo import DemoOptions, measure_memory, training_config

    out = console(stderr=True)
    began = time.perf_counter()
    options = DemoOptions(
        run=run, ranks=ranks, steps=steps, length=length, layout=layout_name(layout)
    )
    config = training_config(options)
    config.resolve_mesh(ranks)
    folder = _clear(Path(run))
    seconds: dict[str, float] = {}

    @contextmanager
    def part(name: str, title: str) -> "Iterator[None]":
        started = time.perf_counter()
        shown = (
            f"{title} ({shown_seconds(started - began)} so far)" if seconds else title
        )
        out.rule(shown, align="left") if out.is_terminal else out.print(shown)
        yield
        seconds[name] = time.perf_counter() - started

    with part(
        "train", f"1  Train: {length:,} tokens per sequence over a ring of {ranks}"
    ):
        trained = launch(train_rank, ranks, config)[0]
    with part("proof", "2  Prove: the same batch on one process and on the ring"):
        proof = launch(_prove_rank, ranks, trained.model, options, threads=1)[0]
    with part(
        "memory", "3  Measure: activations that a rank holds on rings of 1, 2 and 4"
    ):
        held = measure_memory(options, _say)
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    settings, facts = config.model.config_values(), trained.facts
    names = {
        "layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "vocabulary": "vocab_size",
    }
    result: dict[str, Any] = {
        "command": shlex.join(["ringspan", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": {"type": settings["model_type"], "parameters": facts["parameters"]}
        | {name: settings[key] for name, key in names.items()},
        "data": {name: facts[name] for name in ("documents", "tokens")}
        | {"description": "source and documentation of the running Python"},
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
    from ringspan.train.demo import prove

    quiet()
    return prove(folder, options, _say if dist.get_rank() == 0 else lambda line: None)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def _clear(folder: Path) -> Path:
    if not (folder / "metrics.jsonl").exists():
        return folder
    for name in ("model", "tensorboard", "checkpoints", "watchdog", "tokenizer"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (
        "run.json",
        "data.json",
        "exported",
        "metrics.jsonl",
        "result.json",
        "report.html",
    ):
        (folder / name).unlink(missing_ok=True)
    return folder


def _summary(result: dict[str, Any], folder: Path) -> None:
    """Print losses, speed, the comparison with one process and with float64, and memory, as lines of facts."""
    first, last, proof = result["metrics"][0], result["metrics"][-1], result["proof"]
    worst, errors = (
        max(proof["gradients"], key=lambda row: row["relative_difference"]),
        proof["worst_error"],
    )
    rows = [
        ("loss", f"{first['loss']:.3f} -> {last['loss']:.3f} in {last['step']} steps"),
        *(
            ("held-out loss", f"{line['eval_loss']:.3f}")
            for line in result["evaluation"][-1:]
        ),
        (
            "speed",
            f"{last['tokens_per_second']:,.0f} tokens/s, {last['matmul_utilization']:.0%} of a matmul's speed",
        ),
        ("loss, one process", f"{proof['loss_one_process']:.7f}"),
        (f"loss, ring of {proof['ranks']}", f"{proof['loss_ring']:.7f}"),
        ("difference", f"{proof['loss_relative_difference']:.1e} relative"),
        (
            "worst gradient",
            f"{worst['relative_difference']:.1e} relative ({worst['name']})",
        ),
        (
            "against float64",
            f"ring {errors['ring']:.1e}, one process {errors['one_process']:.1e} at worst",
        ),
    ]
    for row in result["memory"]:
        held = f"{row['activation_bytes'] / 1e6:.1f} MB per rank, {row['tokens_per_rank']:,} tokens each"
        rows.append((f"activations, ring {row['ring']}", held))
    rows.append(
        (
            "time",
            ", ".join(
                f"{name} {value:.0f} s" for name, value in result["seconds"].items()
            ),
        )
    )
    facts(console(), "ringspan demo", [*rows, ("report", str(folder / "report.html"))])
