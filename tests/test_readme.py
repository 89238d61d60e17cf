"""What tests/README.md and the promises of the front page name exists, and its figures are current."""

import json
import re
from pathlib import Path

from tests.cli.commands.test_plan import printed

TESTS = Path(__file__).parent


def test_every_test_that_is_named_exists():
    pages = [
        (TESTS.parent / page).read_text()
        for page in ("tests/README.md", "README.md", "docs/promises.md")
    ]
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", pages[0])
    named += [
        (path.removeprefix("tests/"), "")
        for path in re.findall(r"`(tests/[\w/.]+)`", pages[1] + pages[2])
    ]
    assert len(named) > 30
    for path, name in named:
        file = next(
            (
                TESTS / part / path
                for part in ("", "mutants")
                if (TESTS / part / path).exists()
            ),
            None,
        )
        assert file, path
        assert not name or f"def {name}(" in file.read_text(), f"{path}::{name}"


def test_the_figures_of_the_front_page_are_current(monkeypatch, capsys):
    page = (TESTS.parent / "README.md").read_text()
    asked = [
        "plan",
        "--model",
        "llama-3.1-8b",
        "--devices",
        "8",
        "--device",
        "h100",
        "--length",
        "1048576",
        "--json",
    ]
    plan = json.loads(printed(monkeypatch, capsys, *asked))
    assert (
        f"| 1,048,576 | {plan['step_seconds']:.0f} | {plan['peak_bytes'] / 1e9:.1f} |"
        in page
    )
    assert (
        "| 131,072 | 4 | `attention` | 10.31 |"
        in (TESTS.parent / "docs" / "gpu.md").read_text()
    )
    assert "| 131,072 | 10.3 | 37.2 |" in page
