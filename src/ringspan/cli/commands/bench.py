"""``ringspan bench``: speed and memory, as ratios from one interleaved run."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ringspan.cli.checks import (
    DTYPE_BYTES,
    MOST_RANKS,
    AsJson,
    check_dtype,
    check_heads,
    check_memory,
)
from ringspan.cli.console import console, say, table
from ringspan.core.messages.numbers import numbers_in
from ringspan.core.messages.units import shown_bytes, shown_seconds, shown_speed

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory against one process. Close other programs first: everything here is timed.",
)

_LEAST_TOKEN_BYTES = 1024  # least memory per token of a step of the small models: their hidden states take more
# Largest number of tokens and other sizes; the machine's memory is checked in addition.
_MOST = 1 << 40
Ranks = Annotated[
    int,
    typer.Option(min=1, max=MOST_RANKS, help="Processes in the ring, one thread each."),
]
Length = Annotated[
    int, typer.Option(min=1, max=_MOST, help="Tokens of the whole sequence.")
]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16 (float16 on CUDA).")]
LayoutOption = Annotated[
    str, typer.Option("--layout", help="zigzag, striped or contiguous.")
]
Repeats = Annotated[
    int, typer.Option(min=1, help="Timed repeats; medians are reported.")
]
Heads = Annotated[int, typer.Option(min=1, max=_MOST, help="Query heads.")]
KvHeads = Annotated[
    int, typer.Option(min=1, help="Key/value heads; must divide the query heads.")
]
HeadDim = Annotated[int, typer.Option(min=1, max=_MOST, help="Size of a head.")]
MaskText = Annotated[
    str, typer.Option(help="causal, full, window:4096, documents:700,1300,...")
]


@app.command(
    "attention",
    epilog="Example: ringspan bench attention --ranks 2 --length 16384 --dtype bfloat16 --json",
)
def attention(
    ranks: Ranks = 2,
    length: Length = 8192,
    batch: Annotated[int, typer.Option(min=1, max=_MOST, help="Sequences.")] = 1,
    heads: Heads = 8, kv_heads: KvHeads = 8, head_dim: HeadDim = 64, dtype: Dtype = "float32",
    mask: MaskText = "causal", layout: LayoutOption = "zigzag",
    route: Annotated[
        str, typer.Option(help="ring, bidirectional, double-ring:I, all-gather, pass-q, ulysses[:U[+ROUTE]].")
    ] = "ring",
    repeats: Repeats = 5, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time ring attention on N ranks of one thread against scaled_dot_product_attention in a process of N threads."""
    from ringspan.core.geometry.layout import layout_name
    from ringspan.core.geometry.mask import Mask
    from ringspan.core.schedule.route import Route, member_heads
    from ringspan.measure.bench.one_process import AttentionCase, run_attention

    check_dtype(dtype)
    Mask.parse(mask)  # refuse here, not in each rank
    check_heads(heads, kv_heads, head_dim)
    member_heads(heads, kv_heads, Route.parse(route, ranks).ulysses)
    # Each timed process holds queries, their gradients, the result and its gradient.
    check_memory(
        f"--length {length}", 4 * batch * length * heads * head_dim * DTYPE_BYTES[dtype]
    )
    case = AttentionCase(
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
    result = _measured(
        run_attention, case, "attention of a ring and of one process", as_json
    )
    rows = [
        [
            kind.replace("_", "+"),
            *(
                shown_seconds(result[f"{who}_seconds"][kind])
                for who in ("ring", "baseline")
            ),
            f"{result['ratio_' + kind]:.3f}",
            shown_speed(1e9 * result["gflops"][kind]),
        ]
        for kind in ("forward", "forward_backward")
    ]
    _table(
        f"{length:,} tokens, {mask}, {dtype}",
        ["", "ring", "one process", "ratio", "speed"],
        rows,
    )
    forward, both = (
        shown_seconds(result["exposed_comm_seconds"][kind])
        for kind in ("forward", "forward_backward")
    )
    print(f"exposed communication {forward} forward, {both} forward and backward")
    held, alone = (
        shown_bytes(result["peak_bytes_per_token"][who]) for who in ("ring", "baseline")
    )
    print(f"peak memory without the inputs {held} per token, one process {alone}")
    print(f"largest relative error against float64 {result['max_relative_error']:.1e}")


@app.command(
    "ring",
    epilog="Example: ringspan bench ring --virtual-ranks 8 --tokens 8192 --dtype bfloat16 --json",
)
def ring(
    virtual_ranks: Annotated[int, typer.Option(min=1, max=1 << 16, help="Ranks of the rehearsed ring.")] = 8,
    rank: Annotated[int, typer.Option(min=0, help="The rank that this device runs.")] = 0,
    tokens: Annotated[int, typer.Option(min=2, max=_MOST, help="Tokens per rank.")] = 8192,
    heads: Heads = 32, kv_heads: KvHeads = 8, head_dim: HeadDim = 128, dtype: Dtype = "bfloat16",
    mask: MaskText = "causal", layout: LayoutOption = "zigzag",
    kernel: Annotated[str, typer.Option(help="auto, cudnn, flash, flash2, flash3, flash4, triton, ...")] = "auto",
    repeats: Repeats = 5,
    error_ranks: Annotated[str, typer.Option(help="Ring sizes to compare with float64; empty: none.")] = "1,8,64",
    error_tokens: Annotated[int, typer.Option(min=2, max=1 << 20, help="Tokens of that comparison.")] = 4096,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run one rank's whole schedule on this device, against the fastest single kernel; copies stand for transfers."""
    from ringspan.core.geometry.layout import layout_name
    from ringspan.core.names import kernel_name
    from ringspan.measure.bench.ring import RingCase, run

    check_dtype(dtype)
    check_heads(heads, kv_heads, head_dim)
    sizes = numbers_in("--error-ranks", error_ranks, "1,8,64") if error_ranks else ()
    check_memory(
        f"--tokens {tokens}", 4 * tokens * heads * head_dim * DTYPE_BYTES[dtype]
    )
    case = RingCase(
        virtual_ranks=virtual_ranks,
        rank=rank,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        mask=mask,
        layout=layout_name(layout),
        kernel=kernel_name(kernel),
        repeats=repeats,
        error_ranks=sizes,
        error_tokens=error_tokens,
    )
    result = _measured(run, case, "one rank's hops", as_json)
    rows = [
        [
            kind,
            shown_seconds(result["seconds"]["ring"][kind]),
            shown_speed(result["flops_per_second"]["ring"][kind]),
            result["fastest_kernel"][kind],
            *(f"{result[name][kind]:.3f}" for name in ("efficiency", "transfer_share")),
        ]
        for kind in ("forward", "backward")
    ]
    headers = ["", "hops", "speed", "fastest", "hops / kernel", "transfers"]
    _table(
        f"rank {rank} of {virtual_ranks}, {tokens:,} tokens per rank, {mask}, {dtype}",
        headers,
        rows,
    )
    for row in result["errors"]:
        print(
            f"{row['ranks']} ranks: relative error of out {row['out']:.1e}, of dq {row['dq']:.1e}; "
            f"a single kernel {row['alone_out']:.1e}, {row['alone_dq']:.1e}"
        )


@app.command(
    "step", epilog="Example: ringspan bench step --ranks 2 --dtype bfloat16 --json"
)
def step(
    ranks: Ranks = 2, length: Length = 8192, dtype: Dtype = "float32", layout: LayoutOption = "zigzag",
    checkpoint: Annotated[str, typer.Option(help="none, full or attention, also for the baseline.")] = "attention",
    repeats: Repeats = 3, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time a training step of a small Llama: the ring against transformers' sdpa in one process of N threads."""
    from ringspan.core.geometry.layout import layout_name
    from ringspan.core.names import checkpoint_name
    from ringspan.measure.bench.one_process import StepCase, run_step

    check_dtype(dtype)
    check_memory(f"--length {length}", _LEAST_TOKEN_BYTES * length)
    case = StepCase(
        ranks=ranks,
        length=length,
        dtype=dtype,
        layout=layout_name(layout),
        checkpoint=checkpoint_name(checkpoint),
        repeats=repeats,
    )
    result = _measured(run_step, case, "steps of a ring and of one process", as_json)
    speeds = [
        f"{result[f'{who}_tokens_per_second']:,.0f}" for who in ("ring", "baseline")
    ]
    rows = [
        [
            *speeds,
            f"{result['ratio_tokens_per_second']:.3f}",
            shown_bytes(result["peak_bytes"]),
        ]
    ]
    _table(
        f"one step of {length:,} tokens, {dtype}",
        ["ring tokens/s", "one process", "ratio", "peak"],
        rows,
    )


def _measured(
    run: Callable[[Any], dict[str, Any]], case: object, what: str, as_json: bool
) -> dict[str, Any]:
    """Run a benchmark after a line that announces it (a spinner would disturb it), or print its JSON and exit."""
    if as_json:
        print(json.dumps(run(case)))
        raise typer.Exit
    say(f"measuring {what}")
    return run(case)


def _table(title: str, headers: list[str], rows: list[list[str]]) -> None:
    table(console(), title, headers, rows, numbers=len(headers))
