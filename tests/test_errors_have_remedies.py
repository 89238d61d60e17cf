"""Every error of ours says what to do: an imperative, what must hold, or a remedy that is passed in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ringspan.core import errors

SOURCE = Path(__file__).parents[1] / "src"
OURS = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
# Said by what the words ask for, or by a value whose name promises it; another error's text has its own.
VERBS = """add append build call change choose close compute convert copy correct create cut delete detach download
drop free freeze generate give install keep launch leave list load lower make merge move name pad pass plan prepare put
quantise raise read remove repair replace restore restart resume run save scale see set shard show shut split start stop
take train try turn unset use wait write"""
REMEDY = re.compile(
    rf"(?<![\w-])({'|'.join(VERBS.split())})(?![\w-])|must|expected|need(s|ed)?\b|should|at (least|most)|instead"
)
PASSED = re.compile(
    r"(?i)advice|answer|callbacks|error|explain|first\b|forms|hint|hooked|known|line\b|_other|problem|reason|refus|remed|why|_wrong|^wrong"
)


def without_remedy(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each message of our errors that does not say what to do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OURS and node.args:
            parts = list(ast.walk(node.args[0]))
            text = " ".join(
                part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            names = " ".join(getattr(part, "id", getattr(part, "attr", "")) for part in parts)
            if not REMEDY.search(text) and not PASSED.search(names):
                yield node.lineno, text


def test_every_error_says_what_to_do():
    found = {
        f"{file.relative_to(SOURCE)}:{line}": text
        for file in SOURCE.rglob("*.py")
        for line, text in without_remedy(file.read_text(encoding="utf-8"))
    }
    assert found == {}


def test_a_message_without_a_remedy_is_found():
    lines = 'raise ConfigError(f"{x} is odd")', 'raise ConfigError(f"{x} is odd; use 2")', "raise ConfigError(remedy)"
    assert [line for line, _ in without_remedy("\n".join(lines))] == [1]
