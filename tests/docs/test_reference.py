"""Pictures, tables and the reference of JSON keys are those that the library has today."""

import json
import re

import pytest

from benchmarks.pictures import DOCS, PICTURES, drawn
from benchmarks.tables import PAGES, TABLES, filled
from tests.surface import FILE

SECTIONS = {
    "train": "train", "metrics.jsonl": "metrics.jsonl", "plan": "plan and rehearse",
    "plan --rollouts": "plan and rehearse", "rehearse": "plan and rehearse",
    "plan --generate": "plan --generate", "plan --group": "plan --group", "generate": "generate", "eval": "eval",
    "doctor": "doctor", "prove": "prove", "bench attention": "bench attention",
}  # fmt: skip


def test_every_json_key_is_explained_and_no_other():
    text = (DOCS / "reference" / "json.md").read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    frozen = json.loads(FILE.read_text(encoding="utf-8"))["JSON keys"]
    assert set(frozen) == set(SECTIONS)
    for title, body in sections.items():
        first_cells = [
            row.split("|")[1] for row in body.splitlines() if row.startswith("| `")
        ]
        explained = {
            key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)
        }
        expected = {
            key
            for command, section in SECTIONS.items()
            if section == title
            for key in frozen[command]
        }
        assert explained == expected, title


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_the_schedule(name: str):
    assert (DOCS / name).read_text(encoding="utf-8") == drawn(name)


def test_tables_are_made_of_the_results():
    texts = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    assert [name for name, text in texts.items() if filled(text) != text] == [], (
        "run python -m benchmarks.tables"
    )
    assert [
        name
        for name in TABLES
        if not any(f"<!-- table {name} -->" in text for text in texts.values())
    ] == []
