"""The table of trainers holds its bound, and says what does not."""

import json
import math
from itertools import product
from typing import Any

from tests.hf import table
from tests.hf.table import BOUND, CASES, COLUMNS, RESULT, RINGS

ROWS: list[dict[str, Any]] = json.loads(RESULT.read_text())["rows"]


def test_the_committed_table_has_every_case_within_the_bound():
    assert [row["name"] for row in ROWS] == [case.name for case in CASES]
    assert table.beyond(ROWS) == []
    assert "\n".join(table.lines(ROWS)) in table.PAGE.read_text()


def exact(name: str = "DPO") -> dict[str, Any]:
    return {"name": name} | {
        ring: dict.fromkeys((*COLUMNS, "entropy"), 0.0) for ring in RINGS
    }


def test_a_figure_beyond_the_bound_or_missing_is_named():
    for ring, figure, value in product(
        RINGS, [*COLUMNS, "logps/chosen"], [2 * BOUND, math.inf, math.nan]
    ):
        row = exact()
        row[ring][figure] = value
        line = (
            f"DPO, on {ring}: {figure} is {value:.1e} from one process, more than 1e-05"
        )
        assert table.beyond([exact("KTO"), row]) == [line]
    row = exact()
    del row["ring 3"]["loss"]
    row["ring 2"]["weights"] = BOUND
    row["2 x ring 2"]["entropy"] = 1.0  # a mean over the batches of replicas
    assert table.beyond([row]) == [
        "DPO, on ring 3: loss is nan from one process, more than 1e-05"
    ]
