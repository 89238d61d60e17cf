"""``python -m benchmarks.conformance``: run every case against a given attention, and explain the results."""

import json
import sys
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from benchmarks.conformance.cases import CASES, Case
from benchmarks.conformance.ranks import Ranks, find, is_unsupported, joined
from ringspan.core.messages.numbers import numbers_in
from ringspan.core.names import LAYOUT_NAMES

MOST_SECONDS: Final = 86_400

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    epilog="Example: python -m benchmarks.conformance --attention my_module:attention --layout contiguous"
)
def main(
    attention: Annotated[
        str,
        typer.Option(
            help="Your function, as module:function; the contract is in the docs."
        ),
    ],
    loss: Annotated[
        str | None,
        typer.Option(
            help="loss(logits, labels, group) on a rank's shards, labels shifted, -100 ignored."
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help=f"Which positions a rank holds: {', '.join(LAYOUT_NAMES)}."),
    ] = "zigzag",
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, separated by commas.")
    ] = "2,3,4",
    device: Annotated[
        str, typer.Option(help="cpu, with gloo, or cuda, with NCCL and a GPU per rank.")
    ] = "cpu",
    seconds: Annotated[
        float,
        typer.Option(
            help="Seconds after which a rank that does not answer counts as hanging."
        ),
    ] = 30.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object on stdout.")
    ] = False,
) -> None:
    """Test a context-parallel attention against float64: leaks, stale keys, gradients, windows, lengths, losses."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        sizes = numbers_in("--ranks", ranks, "2,3,4")
        _check(layout, device, max(sizes), seconds)
        for name in (attention, loss):
            if name is not None:
                find(name)
    except ValueError as error:
        typer.echo(f"benchmarks.conformance: {error}", err=True)
        raise typer.Exit(2) from None
    rows: list[dict[str, Any]] = []
    for size in sizes:
        team = Ranks(size, attention, loss, layout, device, seconds)
        try:
            for row in _rows(team, loss is not None):
                rows.append(row)
                if not as_json:
                    typer.echo(_line(row))
        finally:
            team.close()
    if as_json:
        for row in rows:  # JSON has no infinity, and nothing that is no number
            row["errors"] = {
                name: error if isfinite(error) else None
                for name, error in row["errors"].items()
            }
        typer.echo(
            json.dumps(
                {
                    "attention": attention,
                    "layout": layout,
                    "device": device,
                    "rows": rows,
                }
            )
        )
    else:
        typer.echo(_summary(rows))
    outcomes = {row["outcome"] for row in rows}
    raise typer.Exit(int("failed" in outcomes or "passed" not in outcomes))


def _check(layout: str, device: str, most_ranks: int, seconds: float) -> None:
    if layout not in LAYOUT_NAMES:
        raise ValueError(f"--layout {layout}: give {', '.join(LAYOUT_NAMES)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: give cpu or cuda")
    if device == "cuda" and (gpus := torch.cuda.device_count()) < most_ranks:
        raise ValueError(
            f"--device cuda: there are {gpus} GPUs for {most_ranks} ranks; give fewer --ranks, or cpu"
        )
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(
            f"--seconds {seconds}: more than 0 and at most {MOST_SECONDS:,} are needed"
        )


def _rows(team: Ranks, has_loss: bool) -> Iterator[dict[str, Any]]:
    for number, case in enumerate(CASES):
        if case.name == "loss" and not has_loss:
            yield _row(case, team.size, "not asked", "give --loss")
            continue
        yield judged(case, team.size, team.run(number))


def judged(case: Case, ranks: int, found: list[Any]) -> dict[str, Any]:
    if all(map(is_unsupported, found)):
        return _row(case, ranks, "not supported", found[0].partition(": ")[2])
    said = [each for each in found if isinstance(each, str)]
    if said:
        first = next((each for each in said if not is_unsupported(each)), said[0])
        return _row(case, ranks, "failed", f"rank {found.index(first)}: {first}")
    if None in found:
        return _row(case, ranks, "failed", f"rank {found.index(None)} did not answer")
    errors = joined(found)
    # A comparison with NaN is false, so that it fails; and so does a case that compared nothing.
    passed = bool(errors) and all(error <= case.limit for error in errors.values())
    return _row(
        case,
        ranks,
        "passed" if passed else "failed",
        "" if passed else case.cause,
        errors,
    )


def _row(
    case: Case,
    ranks: int,
    outcome: str,
    said: str,
    errors: dict[str, float] | None = None,
) -> dict[str, Any]:
    facts = {
        "case": case.name,
        "ranks": ranks,
        "outcome": outcome,
        "errors": errors or {},
    }
    return {**facts, "limit": case.limit, "said": said}


def _line(row: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
    told = f"{row['case']:<20} {row['ranks']} ranks   {row['outcome']:<14} {errors}"
    return (
        f"{told.rstrip()}\n    {row['said']}"
        if row["said"] and row["outcome"] != "not asked"
        else told.rstrip()
    )


def _summary(rows: list[dict[str, Any]]) -> str:
    counts = {
        kind: sum(row["outcome"] == kind for row in rows)
        for kind in ("passed", "failed", "not supported")
    }
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    growth = [
        f"{row['ranks']} ranks {max(row['errors'].values()):.2f}"
        for row in rows
        if row["case"] == "bfloat16" and row["errors"]
    ]
    lines = [f"\n{told}. Errors are relative to float64, over all ranks."]
    if growth:
        lines.append(f"bfloat16, times the error of one process: {', '.join(growth)}")
    return "\n".join(lines)


if __name__ == "__main__":
    app()
