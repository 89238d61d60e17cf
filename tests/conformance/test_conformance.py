"""The suite passes what is right, ours or not, and catches each wrong attention by the case that is named for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

from benchmarks.conformance import own
from benchmarks.conformance.__main__ import app, judged
from benchmarks.conformance.cases import CASES, Setting
from benchmarks.conformance.ranks import outcome
from tests.cases import few, refusals
from tests.conformance import wrong
from tests.pool import Pool

NUMBERS = {case.name: number for number, case in enumerate(CASES)}
RIGHT = {"own": own.attention, "gathered": wrong.gathered}


def on_rank(mesh: DeviceMesh, number: int, attention: str, loss: str) -> Any:
    wrong.KEPT.clear()
    called = RIGHT.get(attention) or getattr(wrong, attention)
    setting = Setting(
        called,
        getattr(wrong, loss),
        "zigzag",
        mesh["ring"].get_group(),
        torch.device("cpu"),
    )
    return outcome(CASES[number].run, setting, CASES[number].problem)


def row(
    pool: Pool, ranks: int, name: str, attention: str, loss: str = "loss"
) -> dict[str, Any]:
    number = NUMBERS[name]
    return judged(
        CASES[number], ranks, pool.run(on_rank, ranks, number, attention, loss)
    )


@pytest.mark.parametrize("attention", few(RIGHT, 2))
def test_what_is_right_passes(pool: Pool, attention: str):
    rows = [
        row(pool, ranks, name, attention) for ranks in (1, 2, 3) for name in NUMBERS
    ]
    assert [each for each in rows if each["outcome"] != "passed"] == []


WRONG = [
    ("leaking", "documents"), ("leaking", "document leak"), ("nothing_without_gradients", "document leak"),
    ("padded", "full, uneven"), ("rounded_down", "uneven length"), ("windowless", "window in a block"),
    ("windowed_by_block", "window over blocks"), ("rounding", "bfloat16"), ("stale", "stale keys"),
    ("stale_without_gradients", "stale keys"), ("without_remote_gradients", "causal"),
    ("grouped_by_mean", "grouped heads"), ("contiguous_only", "strides"), ("one_buffer", "two passes"),
    ("first_buffer", "two passes"),
]  # fmt: skip
WRONG_LOSSES = ["mean_of_means", "times_ranks", "detached", "untracked"]


@pytest.mark.parametrize(("attention", "name"), WRONG)
def test_what_is_wrong_is_caught(pool: Pool, attention: str, name: str):
    found = row(pool, 2, name, attention)
    assert found["outcome"] == "failed" and found["said"] == CASES[NUMBERS[name]].cause
    assert max(found["errors"].values()) > 1.5 * found["limit"]


def test_each_case_has_something_wrong_that_it_catches():
    assert {name for _, name in WRONG} | {"loss"} == set(NUMBERS)


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "loss"])
def test_no_case_passes_what_is_no_number_or_has_another_shape(pool: Pool, name: str):
    assert row(pool, 2, name, "not_a_number")["outcome"] == "failed"
    said = row(pool, 2, name, "one_head")["said"]
    assert "returned (1, 1, " in said and "q has (1, 4, " in said


def test_each_wrong_one_passes_what_it_does_right(pool: Pool):
    others = (
        "stale",
        "windowed_by_block",
        "grouped_by_mean",
        "contiguous_only",
        "one_buffer",
        "padded",
        "leaking",
    )
    assert [row(pool, 2, "causal", each)["outcome"] for each in others] == [
        "passed"
    ] * len(others)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("loss", WRONG_LOSSES)
def test_a_wrong_loss_is_caught(pool: Pool, loss: str, ranks: int):
    found = row(pool, ranks, "loss", "gathered", loss)
    assert (
        found["outcome"] == "failed" and found["said"] == CASES[NUMBERS["loss"]].cause
    )


def test_a_rank_without_targets_needs_no_graph(pool: Pool):
    assert (
        row(pool, 2, "loss", "gathered", "without_targets_detached")["outcome"]
        == "passed"
    )


@pytest.mark.parametrize(
    "found",
    [
        [{}, {}],
        [{"out": (0.0, 1.0)}, {}],
        [{"out": (0.0, 1.0)}, {"out": (0.0, 1.0), "dq": (0.0, 1.0)}],
        [{"out": (0.0, 0.0)}, {"out": (0.0, 0.0)}],
        [{"out": (float("nan"), 1.0)}, {"out": (0.0, 1.0)}],
    ],
)
def test_what_is_not_compared_on_every_rank_fails(found: list[Any]):
    assert judged(CASES[0], 2, found)["outcome"] == "failed"
    assert judged(CASES[0], 2, [{"out": (0.0, 1.0)}] * 2)["outcome"] == "passed"


def test_missing_is_not_failed_and_exceptions_are_reported(pool: Pool):
    found = row(pool, 2, "window in a block", "unable")
    assert (found["outcome"], found["said"]) == ("not supported", "no windows")
    found = row(pool, 2, "causal", "failing")
    assert (found["outcome"], found["said"]) == (
        "failed",
        "rank 0: RuntimeError: shapes do not fit",
    )


def test_the_command_reports_and_exits_with_what_it_found():
    command = [
        "--attention",
        "tests.conformance.wrong:leaking",
        "--ranks",
        "2",
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    report = json.loads(result.stdout)
    failed = {each["case"] for each in report["rows"] if each["outcome"] == "failed"}
    assert (result.exit_code, failed) == (1, {"documents", "document leak"})
    assert {
        each["case"] for each in report["rows"] if each["outcome"] == "not asked"
    } == {"loss"}


@refusals("conformance")
def test_what_cannot_be_asked_ends_with_a_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any
):
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = CliRunner().invoke(app, ["--attention", "math:sin", *arguments])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1 and message in result.stderr
