"""The reference has every key that the frozen surface has."""

import json
import re

from tests.docs.pages import DOCS
from tests.surface import FILE

SECTIONS = {
    "train": "train", "metrics.jsonl": "metrics.jsonl", "plan": "plan and rehearse", "rehearse": "plan and rehearse",
    "plan --generate": "plan --generate", "generate": "generate", "eval": "eval", "doctor": "doctor",
    "bench attention": "bench attention",
}  # fmt: skip


def test_every_json_key_is_explained_and_no_other():
    text = (DOCS / "reference" / "json.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    frozen = json.loads(FILE.read_text(encoding="utf-8"))["JSON keys"]
    assert set(frozen) == set(SECTIONS)
    for title, body in sections.items():
        first_cells = [row.split("|")[1] for row in body.splitlines() if row.startswith("| `")]
        explained = {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}
        expected = {key for command, section in SECTIONS.items() if section == title for key in frozen[command]}
        assert explained == expected, title
