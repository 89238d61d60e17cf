"""The table of trainers holds its bound, and says what does not; some of its rows on rings of three."""

import json
import math
from itertools import product
from typing import Any

import pytest

from tests.hf import table
from tests.hf.table import BOUND, CASES, COLUMNS, MEANS, RESULT, RINGS

ROWS: list[dict[str, Any]] = json.loads(RESULT.read_text())["rows"]


def test_the_committed_table_has_every_case_within_the_bound():
    assert [row["name"] for row in ROWS] == [case.name for case in CASES]
    assert table.beyond(ROWS) == []


def exact(name: str = "DPO") -> dict[str, Any]:
    """A row without differences."""
    return {"name": name} | {ring: dict.fromkeys((*COLUMNS, "entropy"), 0.0) for ring in RINGS}


def test_a_figure_beyond_the_bound_or_missing_is_named():
    for ring, figure, value in product(RINGS, [*COLUMNS, "logps/chosen"], [2 * BOUND, math.inf, math.nan]):
        row = exact()
        row[ring][figure] = value
        line = f"DPO, on {ring}: {figure} is {value:.1e} from one process, more than 1e-05"
        assert table.beyond([exact("KTO"), row]) == [line]
        row[ring][figure] = BOUND
        assert table.beyond([row]) == []
    for figure in COLUMNS:
        row = exact()
        del row["ring 3"][figure]
        assert table.beyond([row]) == [f"DPO, on ring 3: {figure} is nan from one process, more than 1e-05"]


def test_means_over_the_batches_of_replicas_are_left_out_there_alone():
    row = exact()
    for ring in RINGS:
        row[ring]["entropy"] = 1e-3
    assert {line.partition(":")[0] for line in table.beyond([row])} == {"DPO, on ring 2", "DPO, on ring 3"}
    assert all(RINGS[ring][1] > 1 for ring, _ in MEANS)


def test_a_run_that_measures_too_much_fails(monkeypatch):
    """With exit status 1, as of every text that sys.exit is given, after the table is written."""
    written: list[Any] = []
    bad = exact(CASES[0].name) | {"library": "raises"}
    bad["ring 2"]["weights"] = 3e-5
    monkeypatch.setattr(table, "serve_forks", lambda *_: None)
    monkeypatch.setattr(table, "Pool", lambda *_, **__: type("", (), {"close": lambda _: None})())
    monkeypatch.setattr(table, "measured", lambda case, pools: bad)
    monkeypatch.setattr(table, "write", lambda rows, releases: written.extend(rows))
    with pytest.raises(SystemExit) as stop:
        table.main([CASES[0].name])
    assert stop.value.code == f"{CASES[0].name}, on ring 2: weights is 3.0e-05 from one process, more than 1e-05"
    assert written[0] is bad and written[1:] == ROWS[1:]


@pytest.mark.long
@pytest.mark.parametrize("name", ["DPO", "KTO", "reward model, learning rate 3e-3", "GRPO, completions given"])
def test_ten_steps_on_three_ranks_equal_one_process(world, name):
    (case,) = (case for case in CASES if case.name == name)
    found, expected = table.apart(case, "ring 3", world)
    assert len(expected["loss"]) == len(expected["grad_norm"]) == 10 and len(expected["eval_loss"]) == 1
    assert not {figure: value for figure, value in found.items() if not value <= BOUND}
    assert set(found) >= set(COLUMNS)
