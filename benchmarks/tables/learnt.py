"""What agents learnt: examples/in_context_rl."""

from collections.abc import Sequence

from benchmarks.result_files import read, table


def returns(world: str) -> str:
    """Return by trajectories in context."""
    names = {"bc": "behaviour cloning, 1", "1": "decision transformer, 1"}
    rows: list[Sequence[object]] = []
    for row in read("in-context-rl-cpu")["worlds"][world]["table"]:
        ends = [
            _with_interval(row[f"{name}_return"], row[f"{name}_interval"])
            for name in ("last", "quarter")
        ]
        gain = (
            ""
            if row["gain"] is None
            else _with_interval(row["gain"], row["gain_interval"])
        )
        shown = names.get(row["kind"], row["kind"])
        rows.append(
            (
                shown,
                f"{row['tokens']:,}",
                f"{row['first_return']:.2f}",
                *ends,
                gain,
                row["seeds"],
                row["ranks"],
            )
        )
    head = (
        "trajectories in context",
        "tokens",
        "first attempt",
        "last attempt",
        "last quarter of attempts",
        "more than the row above",
        "seeds",
        "processes",
    )
    return table(head, rows)


def _with_interval(value: float, half: float | None) -> str:
    return f"{value:.2f}" + ("" if half is None else f" ± {half:.2f}")


def memory(world: str) -> str:
    """Does it train within the stated memory of each process?"""
    found = read("in-context-rl-memory-cpu")["worlds"][world]
    rows = [
        (
            row["ranks"],
            row["trajectories"],
            f"{row['tokens']:,}",
            "trains" if row["trained"] else "raises",
        )
        for row in found["rows"]
    ]
    head = (
        "processes",
        "trajectories",
        "tokens",
        f"{found['memory_mb']} MB for the steps of each",
    )
    return table(head, rows, left=0)
