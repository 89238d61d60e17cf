"""Tables of seconds: attention, steps, other implementations, routes and masks."""

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.result_files import read, table

_MACHINES: Final = {"Intel Xeon": "masks-cpu", "AMD EPYC": "masks-cpu-amd"}
_PEERS: Final = {"sdpa": "one process", "ringattention": "ringattention (JAX)"}
_OPTIONS: Final = {
    "nothing": "no checkpointing, whole logits",
    "loss in blocks": "no checkpointing",
    "feed-forward in blocks": "feed-forward in blocks of 1,024 tokens",
    "feed-forward in blocks of 4096": "feed-forward in blocks of 4,096 tokens",
    "norms in blocks": "norms in blocks",
    "vocabulary in blocks": "vocabulary in blocks of 4,096",
    "offload": "what checkpointing keeps in files",
    "one input of 2 layers": "one kept input for two layers",
    "inputs kept": "`full`",
}


def attention(name: str) -> str:
    """Time of a ring over that of one process, and what either holds."""
    rows: list[Sequence[object]] = []
    for each in (row["result"] for row in read(name)):
        config, exposed, held = (
            each["config"],
            each["exposed_comm_seconds"],
            each["peak_bytes_per_token"],
        )
        rows.append(
            (
                f"{config['length']:,}",
                config["dtype"],
                config["kv_heads"],
                f"{each['ratio_forward']:.3f}",
                f"{each['ratio_forward_backward']:.3f}",
                f"{exposed['forward']:.4f} / {exposed['forward_backward']:.3f}",
                f"{held['ring']:,.0f} / {held['baseline']:,.0f}",
            )
        )
    head = (
        "tokens",
        "dtype",
        "kv heads",
        "forward",
        "forward + backward",
        "exposed seconds",
        "bytes, ring / one",
    )
    return table(head, rows, left=2)


def step(name: str) -> str:
    rows = [
        (
            each["config"]["dtype"],
            f"{each['ring_tokens_per_second']:,.0f}",
            f"{each['baseline_tokens_per_second']:,.0f}",
            f"{each['ratio_tokens_per_second']:.2f}",
        )
        for each in (row["result"] for row in read(name))
    ]
    return table(("dtype", "ring tokens/s", "one process tokens/s", "ratio"), rows)


def jax_attention(name: str) -> str:
    """Seconds of the JAX back end, of the paper's package and of PyTorch."""
    rows: list[Sequence[object]] = []
    for row in read(name)["rows"]:
        seconds = row["seconds"]
        ours = " / ".join(
            f"{seconds[f'ringspan {size} x {size}']:.2f}" for size in (256, 512)
        )
        theirs = " / ".join(
            f"{seconds[f'ringattention {size}']:.2f}" for size in (256, 512, 1024)
        )
        rows.append(
            (
                f"{row['length']:,}",
                f"{ours} s",
                f"{theirs} s",
                f"{seconds['sdpa']:.2f} s",
            )
        )
    head = (
        "tokens",
        "ringspan, chunk 256 / 512",
        "paper's package, chunk 256 / 512 / 1024",
        "SDPA, 2 threads",
    )
    return table(head, rows, left=0)


def peers(name: str, dtype: str) -> str:
    """Seconds and errors of other ring attentions."""
    found = {
        each["config"]["length"]: {row["contender"]: row for row in each["rows"]}
        for each in (row["result"] for row in read(name))
        if each["config"]["dtype"] == dtype
    }
    lengths = sorted(found)
    rows: list[Sequence[object]] = []
    for contender, longest in found[lengths[-1]].items():
        times = [
            f"{row['seconds']:.2f} ({row['ratio']:.2f})"
            if "seconds" in row
            else "raises"
            for row in (found[length][contender] for length in lengths)
        ]
        errors = [
            f"{longest['errors'][each]:.1e}" if "errors" in longest else ""
            for each in ("out", "dq", "dk", "dv")
        ]
        rows.append((_PEERS.get(contender, contender), *times, *errors))
    return table(
        ("", *(f"{length:,}" for length in lengths), "out", "dq", "dk", "dv"), rows
    )


def routes() -> str:
    found = {
        (row["config"]["route"], row["config"]["mask"]): row
        for row in (each["result"] for each in read("routes-cpu"))
    }
    rows: list[Sequence[object]] = []
    for route in dict.fromkeys(route for route, _ in found):
        causal, window = found[route, "causal"], found[route, "window:1024"]
        rows.append(
            (
                f"`{route}`",
                f"{causal['ratio_forward_backward']:.2f}",
                f"{causal['ring_seconds']['forward_backward']:.2f}",
                f"{window['ring_seconds']['forward_backward']:.2f}",
                f"{causal['peak_bytes_per_token']['ring']:,.0f}",
            )
        )
    head = (
        "route",
        "causal, over one process",
        "causal, s",
        "window of 1,024, s",
        "bytes per token, causal",
    )
    return table(head, rows)


def nodes() -> str:
    """Routes over slow links between nodes: measured, and predicted in brackets."""
    (found,) = read("nodes-cpu")
    cases = [
        each
        for each in found["result"]["cases"]
        if (each["length"], each["kv_heads"]) == (8192, 4)
    ]
    rows: list[Sequence[object]] = []
    for route in cases[0]["routes"]:
        cells: list[str] = []
        for case in cases:
            seconds = case["routes"][route]
            shown = f"{seconds['forward_seconds']:.2f} ({seconds['predicted_forward_seconds']:.2f})"
            cells.append(f"**{shown}**" if case["auto"] == route else shown)
        rows.append((f"`{route}`", *cells))
    return table(("route", *(f"{case['gigabits']:g} Gbit/s" for case in cases)), rows)


def packed() -> str:
    """Packed documents against one document, and for as many pairs."""
    (found,) = read("masks-cpu-amd")
    rows = [
        (
            f"{each['heads']}, {each['kv_heads']}, {each['head_dim']}",
            f"{each['documents_seconds']:.2f}",
            f"{each['one_seconds']:.2f}",
            f"{each['ratio']:.2f}",
            f"{each['ratio_of_pairs']:.2f}",
        )
        for each in found["result"]["documents"]
    ]
    head = (
        "query heads, key/value heads, head size",
        "documents, s",
        "one document, s",
        "documents over one",
    )
    return table((*head, "for as many pairs"), rows)


def option_times() -> str:
    """Seconds of a step over those with attention's result kept."""
    found = read("activations-cpu")["time"]["options"]
    return table(
        ("option", "time"),
        [
            (shown, f"{found[name]['ratio_to_attention_kept']:.2f}")
            for name, shown in _OPTIONS.items()
        ],
    )


def windows() -> str:
    """A window beside the whole causal mask."""
    rows: list[Sequence[object]] = []
    for title, name in _MACHINES.items():
        found = _masks(name)["window"]
        seconds = f"{found['causal_seconds']:.1f}", f"{found['window_seconds']:.1f}"
        rows.append(
            (
                title,
                *seconds,
                f"{found['speedup']:.1f}",
                f"{found['speedup_by_pairs']:.1f}",
            )
        )
    return table(
        ("machine", "causal, s", "window, s", "causal over window", "by pairs"), rows
    )


def balance() -> str:
    """Work of either rank over the mean, counted and timed."""
    rows: list[Sequence[object]] = []
    for layout, counted in _masks("masks-cpu")["balance"].items():
        timed = [
            _masks(name)["balance"][layout]["seconds_over_mean"]
            for name in _MACHINES.values()
        ]
        cells = [
            ", ".join(f"{share:.3f}" for share in shares)
            for shares in (counted["pairs_over_mean"], *timed)
        ]
        rows.append((layout, *cells))
    return table(
        ("layout", "pairs", *(f"seconds, {title}" for title in _MACHINES)), rows
    )


def kernel_rows() -> str:
    """What PyTorch's CPU kernel takes a pair, by the size of its tile."""
    found = [_masks(name)["kernel_by_rows"] for name in _MACHINES.values()]
    sizes = list(found[0])
    rows = [
        (title, *(f"{times[size]:.1f}" for size in sizes))
        for title, times in zip(_MACHINES, found, strict=True)
    ]
    return table(("rows of the tile", *(f"{int(size):,}" for size in sizes)), rows)


def _masks(name: str) -> dict[str, Any]:
    (found,) = read(name)
    return found["result"]


def packed_layouts() -> str:
    """Packed documents, balanced and zigzag: seconds of two ranks, and of four on slow links."""
    (found,) = read("documents-cpu")
    two = found["result"]["two_ranks"]["seconds"]
    rows: list[Sequence[object]] = [
        (
            "2 ranks, one host",
            *(f"{two[each]:.2f}" for each in ("balanced", "zigzag")),
            "",
        )
    ]
    for each in found["result"]["four_ranks_on_links"]:
        for route in ("ring", "all-gather"):
            seconds = [
                each["seconds"][f"{layout} {route}"]
                for layout in ("balanced", "zigzag")
            ]
            title = f"4 ranks, {each['gigabits']:g} Gbit/s, `{route}`"
            rows.append(
                (
                    title,
                    *(f"{second:.2f}" for second in seconds),
                    f"{seconds[1] / seconds[0]:.2f}",
                )
            )
    rows[0] = (*rows[0][:3], f"{two['zigzag'] / two['balanced']:.2f}")
    rows.append(
        (
            "1 process, a document at a time",
            f"{two['one process']:.2f}",
            f"{two['one process']:.2f}",
            "",
        )
    )
    return table(
        (
            "65,536 tokens of 200 documents",
            "balanced, s",
            "zigzag, s",
            "zigzag over balanced",
        ),
        rows,
    )
