"""``ringspan profile``: its files, its object, its refusals."""

import json

import pytest

from tests.cases import refusals
from tests.cli.test_bad_input import printed, refusal
from tests.surface import MODEL


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


@pytest.mark.long
def test_it_writes_pictures_and_prints_one_object(monkeypatch, capsys, model, tmp_path):
    out = tmp_path / "out"
    options = (
        "--model",
        model,
        "--ranks",
        "2",
        "--length",
        "128",
        "--route",
        "auto",
        "--layers-per-checkpoint",
        "2",
    )
    result = json.loads(
        printed(monkeypatch, capsys, "profile", *options, "--out", str(out), "--json")
    )
    assert [each["rank"] for each in result["ranks"]] == [0, 1]
    assert all(
        each["peak_bytes"] > 0 and each["step_seconds"] > 0 for each in result["ranks"]
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "memory.png",
        "profile.json",
        "report.html",
        "timeline.png",
    ]
    assert result["files"] == [
        str(out / name)
        for name in ("report.html", "memory.png", "timeline.png", "profile.json")
    ]


@refusals("profile")
def test_bad_input_is_refused_and_nothing_is_written(
    monkeypatch, capsys, model, tmp_path, arguments, message
):
    out = tmp_path / "out"
    assert message in refusal(
        monkeypatch, capsys, "profile", "--model", model, "--out", str(out), *arguments
    )
    assert not out.exists()
