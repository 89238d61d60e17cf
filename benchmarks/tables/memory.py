"""Tables of bytes: what options save, what a machine holds, what prompts and ancestors take."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks.result_files import read, table
from ringspan.core.messages.units import shown_bytes

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


def option_bytes() -> str:
    """The highest moment of a step with more and more options, in GB."""
    rows = read("activations-cpu")["bytes"]["rows"]
    lengths = (8192, 32_768, 131_072)
    peaks = {
        (row["variant"], row["tokens_per_rank"]): row["peak_bytes"] for row in rows
    }
    lines = [
        (shown, *(f"{peaks[variant, length] / 1e9:.1f}" for length in lengths))
        for variant, shown in _VARIANTS.items()
    ]
    return table(("option", "8,192 tokens per rank", "32,768", "131,072"), lines)


def activations() -> str:
    """What the layers keep for backward, of a whole sequence that rings divide."""
    (found,) = read("memory-cpu")
    rows = [row for row in found["result"]["rows"] if row["length"] == 8192]
    held = {
        (row["checkpoint"], row["ring"]): row["bytes"]["activations"] for row in rows
    }
    lines = [
        (
            kind,
            f"{held[kind, 1] / 8192:,.0f}",
            *(f"{held[kind, ring] / 1e6:.1f} MB" for ring in (1, 2, 4)),
        )
        for kind in ("none", "full", "attention")
    ]
    return table(
        ("checkpoint", "bytes per token", "ring 1, 8,192 tokens", "ring 2", "ring 4"),
        lines,
    )


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
        (
            "prompt",
            "to the first token",
            "per token",
            "cache per rank",
            "allocated in addition, at most",
        ),
        rows,
        0,
    )


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


def blocks() -> str:
    """The highest moment of a step by the tokens of a feed-forward's block, in GB."""
    rows = read("activations-cpu")["chunks"]["rows"]
    peaks = {
        (row["tokens_per_rank"], row["checkpoint"], row["chunk_tokens"]): row[
            "peak_bytes"
        ]
        for row in rows
    }
    sizes = sorted({size for _, _, size in peaks})
    lines = [
        (
            f"{tokens:,}, `{kept}`",
            *(f"{peaks[tokens, kept, size] / 1e9:.2f}" for size in sizes),
        )
        for tokens, kept in dict.fromkeys((tokens, kept) for tokens, kept, _ in peaks)
    ]
    return table(
        ("tokens per rank, checkpoint", *(f"{size:,}" for size in sizes)), lines
    )


def contexts() -> str:
    """The longest sequences in a given memory, without options and with all of them."""
    found = _trials()
    rows: list[Sequence[object]] = []
    for budget in sorted({trial.budget for trial in found}):
        inside = [
            trial for trial in found if trial.budget == budget and trial.peak <= budget
        ]
        off, on = (
            max(trial for trial in inside if trial.options == options)
            for options in ("off", "on")
        )
        shown = f"{on.tokens / off.tokens:.1f}", f"{on.peak / 1e9:.2f} GB"
        rows.append(
            (f"{budget / 1e9:.0f} GB", f"{off.tokens:,}", f"{on.tokens:,}", *shown)
        )
    head = (
        "memory",
        "every option off",
        "every option on",
        "times as many",
        "held then",
    )
    return table(head, rows, left=0)


def row_samples() -> str:
    """What a whole step holds beside one that computes a sample of attention's rows."""
    found = _trials()
    whole = {
        (trial.options, trial.tokens): trial for trial in found if trial.rows_in == 1
    }
    rows: list[Sequence[object]] = []
    for trial in sorted(found, key=lambda trial: trial.tokens):
        other = whole.get((trial.options, trial.tokens))
        if trial.rows_in > 1 and other is not None:
            seconds = f"{other.seconds:,.0f} s", f"{trial.seconds:,.0f} s"
            peaks = f"{other.peak / 1e9:.2f} GB", f"{trial.peak / 1e9:.2f} GB"
            rows.append(
                (
                    f"{trial.tokens:,}",
                    trial.options,
                    peaks[0],
                    seconds[0],
                    *(peaks[1], seconds[1]),
                    trial.rows_in,
                )
            )
    head = (
        "tokens",
        "options",
        "whole step",
        "took",
        "sample of rows",
        "took",
        "one row in",
    )
    return table(head, rows, left=0)


class _Trial(NamedTuple):
    tokens: int
    peak: int
    seconds: float
    options: str
    rows_in: int
    budget: float


def _trials() -> list[_Trial]:
    """Every step that a search for the longest context ran."""
    return [
        _Trial(
            trial["length"],
            trial["peak_bytes"],
            trial["step_seconds"],
            each["result"]["config"]["options"],
            each["result"]["config"].get("rows_in", 1),
            each["result"]["budget_bytes"],
        )
        for each in read("context-cpu")
        for trial in each["result"]["trials"]
    ]


def tpus() -> str:
    """What compilers for TPUs say of a step: memory of a device, and messages that a kernel hides."""
    found = read("tpu-compiled")
    rows: list[Sequence[object]] = []
    for row in [*found["attention"], *found["llama-3.1-8b"]]:
        title = (
            f"{row['ring'] * row.get('fsdp', 1)} {row['topology'].partition(':')[0]}"
        )
        if "fsdp" in row:
            tokens = row["ring"] * row["tokens_per_device"]
            title += f", Llama 3.1 8B, {tokens:,} tokens on a ring of {row['ring']}" + (
                f", `fsdp={row['fsdp']}`" if row["fsdp"] > 1 else ""
            )
        kernel = {"xla": "XLA", "pallas": "Pallas"}[row.get("kernel", "pallas")]
        sizes = (
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            f"{row['argument_bytes'] / 1e9:.2f} GB",
        )
        rows.append(
            (
                title,
                f"{row['tokens_per_device']:,}",
                kernel,
                *sizes,
                f"{row['covered']} of {row['messages']}",
            )
        )
    head = (
        "TPUs",
        "tokens per device",
        "kernel",
        "peak of a device",
        "of it arguments",
        "messages hidden by a kernel",
    )
    return table(head, rows)


def weights() -> str:
    """Memory and seconds of loading and saving."""
    rows: list[Sequence[object]] = []
    for name in ("weights-2b-cpu", "weights-cpu", "weights-6b-cpu"):
        found = read(name)
        held = found["anonymous_bytes"]
        sizes = (
            found["file_bytes"],
            held["load, beyond that"],
            held["save, beyond that"],
            found["load_read_bytes"],
        )
        parameters = f"{found['parameters'] / 1e9:.1f} billion ([JSON](../benchmarks/results/{name}.json))"
        seconds = f"{found['load_seconds']:.0f} s", f"{found['save_seconds']:.0f} s"
        rows.append((parameters, *(f"{size / 1e9:.2f} GB" for size in sizes), *seconds))
    return table(
        (
            "parameters",
            "files",
            "loading",
            "saving",
            "read from the disk",
            "loaded in",
            "saved in",
        ),
        rows,
    )


def traced() -> str:
    """Peaks of a traced step by stage of fine-tuning."""
    stages = read("fine-tuning-trace")["stages"]
    return table(
        ("traced", "peak GB", "in"),
        [
            (name, f"{stage['peak_bytes'] / 1e9:.1f}", stage["phase"])
            for name, stage in stages.items()
        ],
    )
