"""What tests/README.md and the promises of the front page name exists."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_is_named_exists():
    promises = ("README.md", "docs/promises.md")
    pages = (TESTS / "README.md").read_text(), "".join((TESTS.parent / page).read_text() for page in promises)
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", pages[0])
    named += [(path.removeprefix("tests/"), "") for path in re.findall(r"`(tests/[\w/.]+)`", pages[1])]
    assert len(named) > 30
    for path, name in named:
        file = next((TESTS / part / path for part in ("", "mutants") if (TESTS / part / path).exists()), None)
        assert file, path
        assert not name or f"def {name}(" in file.read_text(), f"{path}::{name}"
