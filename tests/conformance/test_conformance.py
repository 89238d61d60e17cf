"""The suite passes what is right, ours or not, and catches each wrong attention by the case that is named for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

from ringspan.conformance import own
from ringspan.conformance.__main__ import app, judged
from ringspan.conformance.cases import CASES, Setting
from ringspan.conformance.ranks import Ranks, outcome
from tests.conformance import wrong
from tests.pool import Pool

NUMBERS = {case.name: number for number, case in enumerate(CASES)}
RIGHT = {"own": own.attention, "gathered": wrong.gathered}


def on_rank(mesh: DeviceMesh, number: int, attention: str, loss: str) -> Any:
    wrong.KEPT.clear()
    called = RIGHT.get(attention) or getattr(wrong, attention)
    setting = Setting(called, getattr(wrong, loss), "zigzag", mesh["ring"].get_group(), torch.device("cpu"))
    return outcome(CASES[number].run, setting, CASES[number].problem)


def row(pool: Pool, ranks: int, name: str, attention: str, loss: str = "loss") -> dict[str, Any]:
    number = NUMBERS[name]
    return judged(CASES[number], ranks, pool.run(on_rank, ranks, number, attention, loss))


@pytest.mark.parametrize("attention", RIGHT)
def test_what_is_right_passes(pool: Pool, attention: str):
    rows = [row(pool, ranks, name, attention) for ranks in (1, 2, 3) for name in NUMBERS]
    assert [each for each in rows if each["outcome"] != "passed"] == []


@pytest.mark.parametrize(
    ("attention", "name"),
    [
        ("leaking", "documents"),
        ("leaking", "document leak"),
        ("padded", "full, uneven"),
        ("windowed_by_block", "window over blocks"),
        ("rounding", "bfloat16"),
        ("stale", "stale keys"),
        ("without_remote_gradients", "causal"),
        ("grouped_by_mean", "grouped heads"),
        ("contiguous_only", "strides"),
        ("one_buffer", "two passes"),
    ],
)
def test_what_is_wrong_is_caught(pool: Pool, attention: str, name: str):
    found = row(pool, 2, name, attention)
    assert found["outcome"] == "failed" and found["said"] == CASES[NUMBERS[name]].cause
    assert max(found["errors"].values()) > 1.5 * found["limit"]


def test_each_wrong_one_passes_what_it_does_right(pool: Pool):
    others = ("stale", "windowed_by_block", "grouped_by_mean", "contiguous_only", "one_buffer", "padded", "leaking")
    assert [row(pool, 2, "causal", each)["outcome"] for each in others] == ["passed"] * len(others)


def test_a_mean_of_means_is_caught(pool: Pool):
    assert row(pool, 2, "loss", "gathered", "mean_of_means")["outcome"] == "failed"


def test_what_is_not_there_is_not_a_failure_and_what_is_raised_is_told(pool: Pool):
    found = row(pool, 2, "window in a block", "unable")
    assert (found["outcome"], found["said"]) == ("not supported", "no windows")
    found = row(pool, 2, "causal", "failing")
    assert (found["outcome"], found["said"]) == ("failed", "rank 0: RuntimeError: shapes do not fit")


def test_the_command_reports_and_exits_with_what_it_found():
    command = ["--attention", "tests.conformance.wrong:leaking", "--ranks", "2", "--json"]
    result = CliRunner().invoke(app, command)
    report = json.loads(result.stdout)
    failed = {each["case"] for each in report["rows"] if each["outcome"] == "failed"}
    assert (result.exit_code, failed) == (1, {"documents", "document leak"})
    assert {each["case"] for each in report["rows"] if each["outcome"] == "not asked"} == {"loss"}


def test_imports_are_no_hang_and_what_is_not_supported_restarts_nothing(tmp_path: Path, monkeypatch: Any):
    (tmp_path / "slow.py").write_text(
        "import multiprocessing, time\n"
        "if multiprocessing.current_process().name != 'MainProcess': time.sleep(4)\n"
        "def attention(*args, **options): raise NotImplementedError('anything')\n"
    )
    monkeypatch.chdir(tmp_path)
    ranks = Ranks(2, "slow:attention", None, "zigzag", "cpu", seconds=3.0)
    try:
        assert ranks.run(0) == ["not supported: anything"] * 2
        processes = list(ranks._processes)
        assert ranks.run(1) == ["not supported: anything"] * 2
        assert ranks._processes == processes
    finally:
        ranks.close()


@pytest.mark.parametrize(
    "arguments",
    [["--attention", "nowhere:f"], ["--attention", "math"], ["--attention", "math:sin", "--layout", "diagonal"]],
)
def test_what_cannot_be_asked_ends_with_a_line(arguments: list[str]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
