"""Tables of pages, computed or read from ``benchmarks/results``: ``python -m benchmarks.tables`` fills them in.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; a test fails when a page has another one.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.result_files import read, table
from ringspan.core.messages.units import shown_bandwidth, shown_bytes, shown_speed
from ringspan.plan.cluster.hardware import device, min_block_tokens

DOCS: Final = Path(__file__).parents[1] / "docs"
_GROUPED: Final = 4  # query heads on a key/value head
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
_VARIANTS: Final = {
    "nothing": "nothing",
    "loss in blocks": "loss in blocks of 1,024 tokens",
    "feed-forward in blocks": "and feed-forward in blocks of 1,024 tokens",
    "norms in blocks": "and norms in blocks of 4,096",
    "attention kept": "`attention`, loss in blocks",
    "attention kept, feed-forward in blocks": "and feed-forward in blocks",
    "attention kept, norms in blocks": "and norms in blocks",
    "attention kept, all in blocks": "and vocabulary in blocks of 4,096",
    "attention kept, one input of 4": "and one input of four layers",
    "inputs kept, all in blocks": "`full`, all in blocks",
    "one input of 4 kept, all in blocks": "and one input of four layers",
}


def overlap_devices() -> str:
    """From how many tokens per rank on a ring hides, by data sheets."""
    rows: list[Sequence[object]] = []
    for name in ("a100-80gb", "h100", "b200", "tpu-v5p"):
        each = device(name)
        inside, between = each.intra_node_bandwidth, each.inter_node_bandwidth
        tokens = (min_block_tokens(each.flops, inside), min_block_tokens(each.flops, between))
        links = [shown_bandwidth(inside), shown_bandwidth(between)]
        counts = [f"{count:,.0f}" for count in (*tokens, tokens[1] / _GROUPED)]
        rows.append((each.title, shown_speed(each.flops), *links, *counts))
    return table(
        ("device", "F", "B in a node", "B between nodes", "c in a node", "c between nodes", "c, grouped heads"), rows
    )


def attention(name: str) -> str:
    """Time of a ring over that of one process, and what either holds."""
    rows: list[Sequence[object]] = []
    for each in (row["result"] for row in read(name)):
        config, exposed, held = each["config"], each["exposed_comm_seconds"], each["peak_bytes_per_token"]
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
    head = ("tokens", "dtype", "kv heads", "forward", "forward + backward", "exposed seconds", "bytes, ring / one")
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


def option_times() -> str:
    """Seconds of a step over those with attention's result kept."""
    found = read("activations-cpu")["time"]["options"]
    return table(
        ("option", "time"),
        [(shown, f"{found[name]['ratio_to_attention_kept']:.2f}") for name, shown in _OPTIONS.items()],
    )


def option_bytes() -> str:
    """The highest moment of a step with more and more options, in GB."""
    rows = read("activations-cpu")["bytes"]["rows"]
    lengths = (8192, 32_768, 131_072)
    peaks = {(row["variant"], row["tokens_per_rank"]): row["peak_bytes"] for row in rows}
    lines = [
        (shown, *(f"{peaks[variant, length] / 1e9:.1f}" for length in lengths)) for variant, shown in _VARIANTS.items()
    ]
    return table(("option", "8,192 tokens per rank", "32,768", "131,072"), lines)


def jax_attention(name: str) -> str:
    """Seconds of the JAX back end, of the paper's package and of PyTorch."""
    rows: list[Sequence[object]] = []
    for row in read(name)["rows"]:
        seconds = row["seconds"]
        ours = " / ".join(f"{seconds[f'ringspan {size} x {size}']:.2f}" for size in (256, 512))
        theirs = " / ".join(f"{seconds[f'ringattention {size}']:.2f}" for size in (256, 512, 1024))
        rows.append((f"{row['length']:,}", f"{ours} s", f"{theirs} s", f"{seconds['sdpa']:.2f} s"))
    head = ("tokens", "ringspan, chunk 256 / 512", "paper's package, chunk 256 / 512 / 1024", "SDPA, 2 threads")
    return table(head, rows, left=0)


def activations() -> str:
    """What the layers keep for backward, of a whole sequence that rings divide."""
    (found,) = read("memory-cpu")
    rows = [row for row in found["result"]["rows"] if row["length"] == 8192]
    held = {(row["checkpoint"], row["ring"]): row["bytes"]["activations"] for row in rows}
    lines = [
        (kind, f"{held[kind, 1] / 8192:,.0f}", *(f"{held[kind, ring] / 1e6:.1f} MB" for ring in (1, 2, 4)))
        for kind in ("none", "full", "attention")
    ]
    return table(("checkpoint", "bytes per token", "ring 1, 8,192 tokens", "ring 2", "ring 4"), lines)


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
            f"{row['seconds']:.2f} ({row['ratio']:.2f})" if "seconds" in row else "raises"
            for row in (found[length][contender] for length in lengths)
        ]
        errors = [f"{longest['errors'][each]:.1e}" if "errors" in longest else "" for each in ("out", "dq", "dk", "dv")]
        rows.append((_PEERS.get(contender, contender), *times, *errors))
    return table(("", *(f"{length:,}" for length in lengths), "out", "dq", "dk", "dv"), rows)


def overlap(name: str) -> str:
    """Where a transfer hides, as the law says and as it was measured."""
    (found,) = read(name)
    rows = [
        (
            f"{each['gigabits']:g} Gbit/s",
            each["dtype"],
            each["heads"] // each["kv_heads"],
            f"{each['flops_per_second'] / 1e9:.0f}",
            f"{each['bytes_per_second'] / 1e6:.1f}",
            f"{each['predicted_tokens']:,.0f}",
            f"{each['crossing_tokens']:,.0f}",
            f"{each['crossing_over_predicted']:.2f}",
        )
        for each in found["result"]["sweeps"]
    ]
    head = ("link", "dtype", "query heads on one", "F (GFLOP/s)", "B (MB/s)", "predicted", "measured")
    return table((*head, "measured / predicted"), rows, left=2)


def routes() -> str:
    found = {
        (row["config"]["route"], row["config"]["mask"]): row for row in (each["result"] for each in read("routes-cpu"))
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
    head = ("route", "causal, over one process", "causal, s", "window of 1,024, s", "bytes per token, causal")
    return table(head, rows)


def nodes() -> str:
    """Routes over slow links between nodes: measured, and predicted in brackets."""
    (found,) = read("nodes-cpu")
    cases = [each for each in found["result"]["cases"] if (each["length"], each["kv_heads"]) == (8192, 4)]
    rows: list[Sequence[object]] = []
    for route in cases[0]["routes"]:
        cells: list[str] = []
        for case in cases:
            seconds = case["routes"][route]
            shown = f"{seconds['forward_seconds']:.2f} ({seconds['predicted_forward_seconds']:.2f})"
            cells.append(f"**{shown}**" if case["auto"] == route else shown)
        rows.append((f"`{route}`", *cells))
    return table(("route", *(f"{case['gigabits']:g} Gbit/s" for case in cases)), rows)


def layouts() -> str:
    """Balance and bytes of documents on 16 ranks."""
    kinds = {
        "lognormal": "lognormal around 2K",
        "code": "Python's source files",
        "one_long": "one of 64K among short ones",
    }
    found = {
        (row["layout"], row["documents"]): row
        for row in read("layouts-counts")["rows"]
        if (row["length_tokens"], row["ranks"]) == (1 << 20, 16)
    }
    names = ("balanced", "zigzag", "zigzag per document", "chunks")
    rows: list[Sequence[object]] = []
    for name in (*names, "ulysses"):
        cells = [
            shown
            for kind in kinds
            for row in (found[name, kind],)
            for shown in (f"{row['most_work_over_mean']:.2f}", f"{row['sent_tokens']:,}")
        ]
        rows.append(("Ulysses" if name == "ulysses" else name, *cells))
    head = [f"{shown}: work" if part == "work" else "sent" for shown in kinds.values() for part in ("work", "sent")]
    return table(("1,048,576 tokens on 16 ranks", *head), rows)


def documents() -> str:
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
    head = ("query heads, key/value heads, head size", "documents, s", "one document, s", "documents over one")
    return table((*head, "for as many pairs"), rows)


def prompts() -> str:
    rows = [
        (
            f"{row['length']:,}",
            f"{row['first_token_seconds']:.3g} s",
            f"{1000 * row['seconds_per_token']:.1f} ms",
            shown_bytes(row["cache_bytes_per_rank"]),
            shown_bytes(row["peak_beside_the_cache_bytes"]),
        )
        for row in read("long-prompts-cpu")["rows"]
    ]
    return table(
        ("prompt", "to the first token", "per token", "cache per rank", "allocated beside it at most"), rows, 0
    )


def states() -> str:
    """Errors of layers with a state against float64, by ranks."""
    rows = [
        (each["layer"], f"{each['tokens']:,}", row["ranks"], f"{row['out']:.1e}", f"{row['worst_gradient']:.1e}")
        for each in read("recurrence-error-cpu")["layers"]
        for row in each["rows"]
    ]
    return table(("layer", "tokens", "ranks", "out", "worst gradient"), rows)


def ancestors() -> str:
    """Seconds and bytes of the systems before ours, by length."""
    rows = read("ancestors-cpu")["rows"]
    names = ("Ring Self-Attention", "blockwise, one process", "Ulysses", "ringspan")
    lines: list[Sequence[object]] = []
    for row in rows:
        found = [row["systems"].get(name) for name in names]
        lines.append(
            (
                f"{row['length']:,}",
                *(shown_bytes(each["peak_bytes"]) if each else "" for each in found),
                *(f"{each['seconds']:.2f}" if each else "" for each in found),
            )
        )
    head = [f"{name}{unit}" for unit in ("", ", s") for name in names]
    return table(("tokens", *head), lines, left=0)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "overlap-devices": overlap_devices,
    "attention": partial(attention, "attention-cpu"),
    "attention-amd": partial(attention, "attention-cpu-amd"),
    "step": partial(step, "step-cpu"),
    "option-times": option_times,
    "option-bytes": option_bytes,
    "kept-activations": activations,
    "jax": partial(jax_attention, "jax-attention-cpu"),
    "jax-amd": partial(jax_attention, "jax-attention-cpu-amd"),
    "peers-float": partial(peers, "peers-cpu", "float32"),
    "peers-bfloat": partial(peers, "peers-cpu", "bfloat16"),
    "peers-amd-float": partial(peers, "peers-cpu-amd", "float32"),
    "peers-amd-bfloat": partial(peers, "peers-cpu-amd", "bfloat16"),
    "overlap": partial(overlap, "overlap-cpu"),
    "overlap-amd": partial(overlap, "overlap-cpu-amd"),
    "routes": routes,
    "nodes": nodes,
    "layouts": layouts,
    "packed": documents,
    "prompts": prompts,
    "states": states,
    "ancestors": ancestors,
}
PAGES: Final = (
    "understand/overlap.md",
    "understand/ancestors.md",
    "memory.md",
    "jax.md",
    "performance.md",
    "peers.md",
    "overlap.md",
    "routes.md",
    "layouts.md",
    "masks.md",
    "generation.md",
    "hybrids.md",
)


def filled(text: str) -> str:
    """A page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        if found[1] not in TABLES:  # of another module
            return found[0]
        return f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table ([a-z-]+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in PAGES:
        page = DOCS / name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
