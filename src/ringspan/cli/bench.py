"""``ringspan bench``: speed and memory, as ratios from one interleaved run."""

import json
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory against one process. Close other programs first: everything here is timed.",
)

_DTYPES = ("float32", "bfloat16", "float16")

Ranks = Annotated[int, typer.Option(min=1, help="Processes in the ring, one thread each.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16 (float16 on CUDA).")]
LayoutOption = Annotated[str, typer.Option("--layout", help="zigzag, striped or contiguous.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats; the medians are reported.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


@app.command("attention", epilog="Example: ringspan bench attention --ranks 2 --length 16384 --dtype bfloat16 --json")
def attention(
    ranks: Ranks = 2,
    length: Length = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads; they divide the query heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    dtype: Dtype = "float32",
    mask: Annotated[str, typer.Option(help="causal, full, window:4096, documents:700,1300,...")] = "causal",
    layout: LayoutOption = "zigzag",
    route: Annotated[
        str, typer.Option(help="ring, bidirectional, double-ring:I, all-gather, ulysses[:U[+ROUTE]].")
    ] = "ring",
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Ring attention on N ranks of one thread against scaled_dot_product_attention on one process of N threads."""
    from ringspan.bench.attention import AttentionCase, run
    from ringspan.core.layout import layout_name
    from ringspan.core.mask import Mask
    from ringspan.core.route import Route, member_heads

    _check_dtype(dtype)
    Mask.parse(mask)  # refuse here, not in each rank
    member_heads(heads, kv_heads, Route.parse(route, ranks).ulysses)
    result = run(
        AttentionCase(
            ranks=ranks,
            length=length,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            mask=mask,
            layout=layout_name(layout),
            route=route,
            repeats=repeats,
        )
    )
    if as_json:
        print(json.dumps(result))
        return
    rows = [
        [
            kind.replace("_", "+"),
            f"{result['ring_seconds'][kind]:.4f}",
            f"{result['baseline_seconds'][kind]:.4f}",
            f"{result['ratio_' + kind]:.3f}",
            f"{result['gflops'][kind]:.0f}",
        ]
        for kind in ("forward", "forward_backward")
    ]
    _table(f"{length:,} tokens, {mask}, {dtype}", ["", "ring s", "one process s", "ratio", "GFLOP/s"], rows)
    waited = result["exposed_comm_seconds"]
    both = waited["forward_backward"]
    print(f"exposed communication {waited['forward']:.4f} s forward, {both:.4f} s forward and backward")
    held = result["peak_bytes_per_token"]
    print(f"peak memory beside the inputs {held['ring']:,.0f} bytes a token, one process {held['baseline']:,.0f}")
    print(f"largest relative error against float64 {result['max_relative_error']:.1e}")


@app.command("step", epilog="Example: ringspan bench step --ranks 2 --dtype bfloat16 --json")
def step(
    ranks: Ranks = 2,
    length: Length = 8192,
    dtype: Dtype = "float32",
    layout: LayoutOption = "zigzag",
    checkpoint: Annotated[str, typer.Option(help="none, full or attention; the baseline does the same.")] = "attention",
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """A whole training step of a small Llama on the ring against transformers' sdpa on one process of N threads."""
    from ringspan.bench.step import StepCase, run
    from ringspan.core.layout import layout_name
    from ringspan.torch.remat import checkpoint_name

    _check_dtype(dtype)
    result = run(
        StepCase(
            ranks=ranks,
            length=length,
            dtype=dtype,
            layout=layout_name(layout),
            checkpoint=checkpoint_name(checkpoint),
            repeats=repeats,
        )
    )
    if as_json:
        print(json.dumps(result))
        return
    speeds = [f"{result[f'{who}_tokens_per_second']:,.0f}" for who in ("ring", "baseline")]
    rows = [[*speeds, f"{result['ratio_tokens_per_second']:.3f}", f"{result['peak_bytes'] / 2**30:.2f}"]]
    _table(f"one step of {length:,} tokens, {dtype}", ["ring tokens/s", "one process", "ratio", "peak GiB"], rows)


@app.command("memory", epilog="Example: ringspan bench memory --length 8192 --json")
def memory(
    length: Length = 8192,
    rings: Annotated[str, typer.Option(help="Ring sizes to compare.")] = "1,2,4",
    layout: LayoutOption = "zigzag",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Bytes of activations that each rank holds, at a fixed length and at fixed tokens a rank."""
    from ringspan.bench.memory import MemoryCase, run
    from ringspan.core.errors import ConfigError
    from ringspan.core.layout import layout_name

    _check_dtype(dtype)
    try:
        sizes = tuple(int(size) for size in rings.split(","))
    except ValueError:
        raise ConfigError(f"--rings {rings!r}: write numbers with commas, such as 1,2,4") from None
    result = run(MemoryCase(rings=sizes, length=length, layout=layout_name(layout), dtype=dtype))
    if as_json:
        print(json.dumps(result))
        return
    rows = [
        [
            str(row["ring"]),
            f"{row['length']:,}",
            f"{row['tokens_per_rank']:,}",
            row["checkpoint"],
            f"{row['bytes']['activations'] / 2**20:.1f}",
        ]
        for row in result["rows"]
    ]
    _table("activations held per rank", ["ring", "tokens", "tokens a rank", "checkpoint", "MiB"], rows)


def _check_dtype(dtype: str) -> None:
    import torch

    from ringspan.core.errors import UnsupportedError

    if dtype not in _DTYPES:
        raise UnsupportedError(f"--dtype {dtype!r} is not supported; use float32 or bfloat16")
    if dtype == "float16" and not torch.cuda.is_available():
        raise UnsupportedError("--dtype float16 on CPU is not supported; use float32 or bfloat16")


def _table(title: str, headers: list[str], rows: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
