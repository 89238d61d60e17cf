"""``ringspan doctor``: devices, speed and problems of this machine or cluster."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.checks import AsJson, LocalRanks, refuse_under_torchrun
from ringspan.cli.commands.prove import proof_of, show_proof
from ringspan.cli.console import console, facts, paragraph, silent, table, working
from ringspan.cli.speed_table import show_speed
from ringspan.core.errors import RingspanError
from ringspan.core.messages.units import shown_bandwidth, shown_bytes, shown_speed
from ringspan.torch.runtime.environment import is_rank

if TYPE_CHECKING:
    from ringspan.proof.run import Proof

EPILOG = (
    "Example: ringspan doctor --ranks 4. Before a job on a cluster: "
    "torchrun --nnodes 2 --nproc-per-node 8 ... -m ringspan doctor"
)


def command(
    model: Annotated[
        str,
        typer.Option(
            help="Prove a small model like this one exact here too: a name, a config.json, its folder, or a Hub id. "
            "Not under torchrun.",
            show_default=False,
        ),
    ] = "",
    ranks: LocalRanks = None,
    watch: Annotated[
        Path | None,
        typer.Option(
            help="Show and draw the speed of each rank of a run with watch_speed=true, by its folder; nothing else.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report devices, kernels, back ends and speed of this machine, what is missing or wrong, and the remedies.

    Starts ranks (or uses torchrun's) to measure links, compare versions and clocks, check the ring against float64,
    and train a model of two layers. Exit code 0 if that trained, and right, and ``--model`` is exact, else 1.
    """
    if watch is not None:
        show_speed(watch, model=model, ranks=ranks, json=as_json)
        return
    is_job = is_rank()
    if is_job:
        refuse_under_torchrun(ranks=ranks, model=model or None)
    prove = proof_of(model, ranks) if model else None
    shown = working() if os.environ.get("RANK", "0") == "0" else nullcontext(silent)
    with shown as doing:
        from ringspan.measure.cluster.doctor import examine, examine_job

        result, is_first = (
            examine_job(doing=doing) if is_job else (examine(ranks, doing), True)
        )
    proof, refusal = None, ""
    if prove is not None:
        try:
            proof = prove()
        except RingspanError as error:
            refusal = str(error)
    if is_first:
        _print(result, proof, refusal, as_json=as_json)
    if not result["can_train"] or refusal or (proof and not proof.is_exact):
        raise typer.Exit(1)


def _print(
    result: dict[str, Any], proof: "Proof | None", refusal: str, *, as_json: bool
) -> None:
    """Print the findings, and the proof of a model or why there is none."""
    if as_json:
        shown = {"refused": refusal} if refusal else proof and proof.as_json()
        print(json.dumps(result | {"proof": shown}))
        return
    _show(result)
    if refusal:
        paragraph(console(), f"not proven: {refusal}", style="red")
    elif proof is not None:
        show_proof(proof)


def _show(result: dict[str, Any]) -> None:
    """Print versions, devices, kernels, speeds and the cluster, then what is missing or wrong, and the verdict."""
    out = console()
    has = [name for name, available in result["backends"].items() if available]
    known = [(name, version) for name, version in result["versions"].items() if version]
    facts(
        out,
        "versions and process groups",
        [*known, ("process groups", ", ".join(has) or "none")],
    )
    memory = [
        (_device(each), shown_bytes(each["memory_bytes"])) for each in result["devices"]
    ]
    facts(out, "devices and their memory", memory)
    _show_kernels(out, result["kernels"])
    speeds = [
        (f"{m['what']}, {m['dtype']}", shown_speed(m["flops"]))
        for m in result["measured_flops"]
    ]
    facts(out, "speed of the slowest rank", speeds)
    if result["cluster"]:
        _show_cluster(out, result)
    if launching := result["launch_seconds"]:
        paragraph(
            out,
            f"the host: {1e3 * launching:.1f} ms for each pass of a layer "
            f"(ringspan plan --device NAME,launch_seconds={launching:.2g})",
        )
    for each in result["missing"]:
        paragraph(
            out,
            f"not installed: {each['name']}, for {each['needed_for']}: {each['remedy']}",
        )
    for problem in result["problems"]:
        style = "red" if problem["stops"] else "yellow"
        paragraph(
            out, f"{problem['what']}; {problem['remedy']}", first="! ", style=style
        )
    can = result["can_train"]
    paragraph(
        out, "can train" if can else "cannot train", style="green" if can else "red"
    )


def _show_kernels(out: Any, kernels: dict[str, dict[str, Any]]) -> None:
    """Print the kernels that run on this machine with what they serve, then the others, grouped by the reason."""
    running = [
        (name, _cases(kernel["serves"]))
        for name, kernel in kernels.items()
        if kernel["available"]
    ]
    facts(out, "kernels and what they compute here", running or [("none", "")])
    others: dict[str, list[str]] = {}
    for name, kernel in kernels.items():
        if not kernel["available"]:
            others.setdefault(kernel["why_not"], []).append(name)
    for reason, names in others.items():
        paragraph(out, f"not here: {', '.join(names)}: {reason}", first="  ")


def _show_cluster(out: Any, result: dict[str, Any]) -> None:
    """Print a row for each rank, then the ring's error, the trial run, and the block size that hides a transfer."""
    cluster = result["cluster"]
    links = {
        link["from"]: shown_bandwidth(link["bytes_per_second"])
        for link in cluster["links"]
    }
    error_ms = 1e3 * cluster["clock_uncertainty_seconds"]
    # Rounded first: -0.3 formatted without decimals would be -0.
    offsets = [
        f"{round(1e3 * offset):+d}" for offset in cluster["clock_offset_seconds"]
    ]
    rows = [
        [
            str(rank),
            fact["host"],
            fact["device"],
            links.get(rank, ""),
            offset,
            _ports(fact["listens"]),
        ]
        for rank, (fact, offset) in enumerate(
            zip(cluster["ranks"], offsets, strict=True)
        )
    ]
    headers = [
        "rank",
        "host",
        "device",
        "to the next",
        f"clock ms (± {error_ms:.0f})",
        "listens on",
    ]
    table(out, "ranks", headers, rows)
    paragraph(out, f"ring against float64: relative error {cluster['ring_error']:.1e}")
    trial = result["trial"]
    if trial["failure"] is None:
        paragraph(
            out,
            f"two optimizer steps of a model of two layers: losses differ from one process by {trial['error']:.1e}, "
            f"{trial['seconds']:.1f} s",
        )
    bandwidth = result["bandwidth_bytes_per_second"]
    if bandwidth:
        reached = next(
            m["flops"] for m in result["measured_flops"] if m["what"] == "attention"
        )
        paragraph(
            out,
            f"all links at once: {shown_bandwidth(bandwidth)} each way. The transfer of a block is hidden from "
            f"{result['min_block_tokens']:,} tokens on (F / B: {shown_speed(result['flops'])} of matrix products over "
            f"the bytes per second of a link), from {round(reached / bandwidth):,} on at the "
            f"{shown_speed(reached)} that attention reaches here",
        )


def _device(device: dict[str, Any]) -> str:
    cores = f", {device['cores']} cores" if "cores" in device else ""
    return f"{device['kind']}: {device['name']}{cores}"


def _cases(serves: dict[str, float]) -> str:
    return (
        "; ".join(
            name if share == 1 else f"{name} {share:.0%}"
            for name, share in serves.items()
        )
        or "nothing"
    )


def _ports(listens: list[str] | None) -> str:
    return "not known" if listens is None else ", ".join(listens) or "nothing"
