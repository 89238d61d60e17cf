"""``ringspan rehearse``: the plan's object and what was measured, tables, refusals."""

import json

import pytest

from tests.cases import refusals
from tests.cli.test_bad_input import printed, refusal
from tests.surface import MODEL, check_object


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


def test_it_prints_the_plan_and_what_was_measured(monkeypatch, capsys, model):
    options = ("--model", model, "--devices", "4", "--length", "512", "--json")
    plan = json.loads(printed(monkeypatch, capsys, "plan", *options))
    result = json.loads(
        printed(
            monkeypatch,
            capsys,
            "rehearse",
            *options,
            "--rank",
            "2",
            "--bandwidth",
            "1e3",
        )
    )
    check_object("rehearse", result)
    assert plan.items() <= result.items()
    assert result["rank"] == 2 and len(result["layers"]) == 2
    assert result["measured_peak_bytes"] >= sum(result["measured_bytes"].values())
    done = (
        result["measured_matmul_utilization"]
        * result["measured_matmul_flops"]
        * result["measured_step_seconds"]
    )
    assert (
        done == pytest.approx(plan["flops_per_step"] / 4)
        and result["measured_step_seconds"] > 0
    )
    waits = result["predicted_exposed_seconds"]
    assert result["predicted_step_seconds"] == pytest.approx(
        result["measured_step_seconds"] + waits
    )
    assert waits > plan["link_bytes_per_step"]["ring"] / 1e3 / 2


@pytest.mark.long
def test_it_prints_tables_for_people(monkeypatch, capsys, model):
    text = printed(
        monkeypatch,
        capsys,
        "rehearse",
        "--model",
        model,
        "--devices",
        "2",
        "--length",
        "256",
    )
    for expected in (
        "rank 0 of replicate 1 x ring 1 x tp 2",
        "measured",
        "communication",
        "waiting for links",
    ):
        assert expected in text


@refusals("rehearse")
def test_bad_input_is_refused(monkeypatch, capsys, model, arguments, message):
    given = ["--model", model, "--devices", "4", *arguments]
    assert message in refusal(monkeypatch, capsys, "rehearse", *given)
