"""The demonstration, in small: every part of it runs, and what it claims is in its result."""

import json
import re
import sys

import pytest

from ringspan.cli.main import main


@pytest.mark.timeout(300)
def test_the_demo_trains_proves_measures_and_reports(monkeypatch, capfd, tmp_path):
    arguments = ["--run", str(tmp_path / "demo"), "--steps", "2", "--length", "256", "--json"]
    monkeypatch.setattr(sys, "argv", ["ringspan", "demo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    said = [line.split("  ", 1)[1] for line in printed.err.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert len(said) == 3
    assert all(f"on a ring of {ring} at" in line for ring, line in zip((1, 2, 4), said, strict=True))
    assert result == json.loads((tmp_path / "demo" / "result.json").read_text())
    assert len(result["metrics"]) == 2 and len(result["evaluation"]) == 1
    assert result["proof"]["loss_relative_difference"] < 1e-6
    assert result["proof"]["worst_error"]["ring"] < 1e-5
    held = {row["ring"]: row["activation_bytes"] for row in result["memory"]}
    assert held[1] / 2 == pytest.approx(held[2], rel=0.03) and held[1] / 4 == pytest.approx(held[4], rel=0.03)
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in page and "one process" in page
