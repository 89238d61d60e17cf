"""Cases of parametrized tests: tables in place of products, and those that ``make test`` leaves out."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import pytest

_REFUSALS: Final = Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8")


def long(*cases: Any) -> list[Any]:
    """Cases of a parametrized test of which ``make test`` tries others; ``make long`` runs them."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long
        )
        for case in cases
    ]


def refusals(command: str, slow: Collection[str] = ()) -> Any:
    """Arguments that a command refuses, and what it says of each: its lines of refusals.txt.

    ``make long`` has those that are slow to refuse.
    """
    rows = [
        line.split(" -> ")
        for line in _REFUSALS.splitlines()
        if line.split()[:1] == [command]
    ]
    cases = [
        pytest.param(
            *(shlex.split(typed)[1:], said),
            marks=pytest.mark.long if typed in slow else (),
        )
        for typed, said in rows
    ]
    return pytest.mark.parametrize(
        ("arguments", "message"), cases, ids=[typed for typed, _ in rows]
    )


def few(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the first of so many cases for ``make test``, the others for ``make long``."""
    taken = list(cases)
    return [
        *taken[::every],
        *long(*(case for number, case in enumerate(taken) if number % every)),
    ]


def pairwise(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few rows in which any two values of two columns meet: most bugs need two values to show, hardly any three.

    Three columns of 3, 3 and 4 values are 12 rows in place of 36.
    """
    pairs = [
        ((a, x), (b, y))
        for a, b in combinations(range(len(columns)), 2)
        for x, y in product(range(len(columns[a])), range(len(columns[b])))
    ]
    # in order, so that the rows are the same in each process
    wanted = dict.fromkeys(pairs)
    rows: list[dict[int, int]] = []
    while wanted:
        row = dict(next(iter(wanted)))
        for column in sorted(range(len(columns)), key=row.__contains__, reverse=True):
            row.setdefault(
                column, _best(column, len(columns[column]), row, rows, wanted)
            )
        for pair in combinations(sorted(row.items()), 2):
            wanted.pop(pair, None)
        rows.append(row)
    return [
        tuple(values[row[column]] for column, values in enumerate(columns))
        for row in rows
    ]


def _best(
    column: int,
    count: int,
    row: dict[int, int],
    rows: list[dict[int, int]],
    wanted: dict[Any, None],
) -> int:
    """Return the value with most new pairs in the row; of equals, the one that fewest rows have."""

    def worth(value: int) -> tuple[int, int]:
        new = sum(
            tuple(sorted(((column, value), other))) in wanted for other in row.items()
        )
        return new, -sum(other[column] == value for other in rows)

    return max(range(count), key=worth)
