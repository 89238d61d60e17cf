"""``ringspan plan``: does it fit, how to run it and how fast it will be, before anything runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.picture import check_picture

if TYPE_CHECKING:
    from ringspan.plan.planner import Plan

EPILOG = "Example: ringspan plan --model llama-3.1-8b --devices 8 --device h100-80gb --length 1048576"


Model = Annotated[
    str, typer.Option("--model", help="A name such as llama-3.1-8b, a config.json or its folder, or a Hugging Face id.")
]
Devices = Annotated[int, typer.Option("--devices", min=1, help="Accelerators in all.")]
Device = Annotated[
    str, typer.Option("--device", help="Their kind: a name such as h100-80gb, or flops=...,memory_bytes=... by hand.")
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Machines that hold them; default: as the kind is usually built.")
]
Length = Annotated[int, typer.Option("--length", min=1, help="Tokens of one sequence.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Sequences of one optimizer step, on all devices.")]
Dtype = Annotated[str, typer.Option("--dtype", help="What layers compute in: bfloat16 or float32.")]
ParameterDtype = Annotated[
    str,
    typer.Option("--parameter-dtype", help="What parameters, gradients and moments are kept in: float32 or bfloat16."),
]
Route = Annotated[
    str,
    typer.Option(
        "--route",
        help="auto, or one that is given: ring, bidirectional, double-ring:I, all-gather, pass-q, ulysses, "
        "ulysses:U, ulysses:U+ROUTE.",
    ),
]


def command(
    model: Model = "llama-3.1-8b",
    devices: Devices = 8,
    device: Device = "h100-80gb",
    nodes: Nodes = None,
    length: Length = 131_072,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    parameter_dtype: ParameterDtype = "float32",
    route: Route = "auto",
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace the real training step on fake tensors for the memory.")
    ] = False,
    rank: Annotated[int, typer.Option(min=0, help="The rank that --trace plays.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw what --trace finds over the step: a .png, .svg or .pdf file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Plan a training step on a cluster: memory, mesh, layout, route, checkpoint policy, time, longest sequence.

    Analytic and without a framework, in under a second; with --trace the real step is traced as one of its ranks.
    """
    from ringspan.core.errors import ConfigError

    if picture:
        if not trace:
            raise ConfigError(f"--picture {picture} draws what a trace finds; add --trace")
        check_picture(picture, ".png", ".svg", ".pdf")
    answer = planned(model, devices, device, nodes, length, batch, dtype, parameter_dtype, route)
    result = answer.as_json()
    if trace:
        result |= _traced(answer, rank, quiet=as_json)
    if picture:
        _draw(answer, result, picture)
    if as_json:
        print(json.dumps(result))
        return
    _show(answer, result)


def planned(
    model: str,
    devices: int,
    device: str,
    nodes: int | None,
    length: int,
    batch: int,
    dtype: str,
    parameter_dtype: str,
    route: str,
) -> "Plan":
    """The plan that the options of the command line ask for."""
    from dataclasses import replace

    from ringspan.core.errors import ConfigError
    from ringspan.plan import hardware
    from ringspan.plan.planner import make_plan
    from ringspan.plan.search import Question
    from ringspan.plan.shapes import model_shape

    kind = hardware.device(device)
    if nodes is not None:
        if devices % nodes:
            raise ConfigError(f"--nodes {nodes} do not share {devices} devices evenly")
        kind = replace(kind, devices_per_node=devices // nodes)
    return make_plan(
        Question(
            shape=model_shape(model),
            device=kind,
            devices=devices,
            length=length,
            batch=batch,
            dtype=dtype,
            parameter_dtype=parameter_dtype,
            route=route,
        )
    )


def _traced(answer: "Plan", rank: int, *, quiet: bool) -> dict[str, Any]:
    """The memory of the plan, from a trace of the real step as one rank."""
    from rich.console import Console

    from ringspan.plan.dryrun import summary, trace_plan

    console = Console(stderr=True, quiet=quiet)
    with console.status("tracing the training step on fake tensors"):
        return summary(trace_plan(answer, rank), answer.question.device.memory_bytes)


def _draw(answer: "Plan", result: dict[str, Any], picture: Path) -> None:
    from ringspan.plan.report import trace_picture

    question = answer.question
    title = (
        f"{question.shape.name}, {question.length:,} tokens, rank {result['rank']} of {question.devices} x "
        f"{question.device.title}: {shown_mesh(result)}, peak {result['peak_bytes'] / 1e9:.1f} GB"
    )
    trace_picture(result["timeline"], question.device.memory_bytes, title, picture)


def shown_mesh(result: dict[str, Any]) -> str:
    """The axes of a plan's mesh; Ulysses groups are inside of the ring, and the route names them."""
    axes = {name: size for name, size in result["mesh"].items() if name in ("replicate", "ring") or size > 1}
    axes.pop("ulysses", None)
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def _show(answer: "Plan", result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    question, cost = answer.question, answer.cost
    console = Console(highlight=False)
    verdict = "[green]fits[/]" if result["fits"] else "[red]does not fit[/]"
    console.print(
        f"[bold]{question.shape.name}[/] ({question.shape.parameters / 1e9:.2f}B parameters), "
        f"{question.batch} x {question.length:,} tokens on {question.devices} x {question.device.title}: {verdict}"
    )
    memory = Table(title="bytes a device at the peak", title_justify="left")
    memory.add_column("category")
    memory.add_column("GB", justify="right")
    for name, num_bytes in result["bytes"].items():
        memory.add_row(name, f"{num_bytes / 1e9:.2f}")
    memory.add_section()
    memory.add_row("peak", f"{result['peak_bytes'] / 1e9:.2f}")
    memory.add_row("device", f"{question.device.memory_bytes / 1e9:.2f}")
    console.print(memory)
    facts = Table(show_header=False)
    facts.add_column()
    facts.add_column()
    blocks, least = result["min_block_tokens"], result["min_tokens_per_device"]
    link = {name: f"{num_bytes / 1e9:,.1f} GB" for name, num_bytes in result["link_bytes_per_step"].items()}
    kept = result["checkpoint"]
    if result["layers_per_checkpoint"] > 1:
        kept += f", {result['layers_per_checkpoint']} layers a checkpoint"
    if result["feedforward_chunk_tokens"]:
        kept += f", feed-forward in chunks of {result['feedforward_chunk_tokens']} tokens"
    if result["host_bytes"]:
        what = ["activations"] * (result["offload"] != "none") + ["AdamW's moments"] * result["optimizer_on_host"]
        kept += f", {result['host_bytes'] / 1e9:,.1f} GB of {' and '.join(what)} on the host"
    longest = f"{result['max_length_tokens']:,} tokens"
    if result["max_length_needs"]:
        longest += f" ({result['max_length_needs']})"
    for name, value in (
        ("mesh", shown_mesh(result)),
        ("micro-steps", f"{result['micro_steps']} of {result['micro_batch']} x {question.length:,} tokens a replica"),
        ("layout, route", f"{result['layout']}, {result['route']}"),
        ("checkpoint", kept),
        ("longest sequence", longest),
        ("FLOPs a step", f"{cost.flops:.3g}"),
        ("time a step", f"{cost.seconds:.3g} s, of which {cost.exposed_seconds:.2g} s wait for links"),
        ("model FLOPs used", f"{cost.mfu:.1%} of the peak"),
        ("tokens/s", f"{cost.tokens_per_second:,.0f}"),
        (
            "arrives at a device",
            f"{link['ring']} for attention, {link['shards']} of parameters and gradients, {link['tensor_sums']} of "
            f"sums over tp; {link['intra_node']} through its links in the node, {link['inter_node']} from outside",
        ),
        ("minimal block F/B", f"{blocks['intra_node']:,} tokens in a node, {blocks['inter_node']:,} between nodes"),
        ("minimal tokens 6F/B", f"{least['intra_node']:,} a device in a node, {least['inter_node']:,} between nodes"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    for reason in result["reasons"]:
        console.print(f"- {reason}", soft_wrap=True)
