"""What examples/retrieval learnt: the figure of docs/evaluation.md and its JSON, from a finished run of the recipe.

    cd runs/retrieval
    ringspan eval lines extended --lengths 512,1024,2048,4096,8192,16384 --items 100 --nproc 2 --json > lines-1.json
    ringspan eval lines unextended untrained --lengths 512,1024,2048,4096,8192,16384 --nproc 2 --json > lines-2.json
    python -m benchmarks.retrieval runs/retrieval

All files ``lines-*.json`` are drawn together; ``notes.txt`` says under what load they were made.

Beside the models is chance: to name the number of any line, which is right once in as many answers as there are lines.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.result_files import read, table
from ringspan.measure.machine import describe_machine
from ringspan.report.evaluation import save_picture

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "retrieval-cpu.json"
PICTURE: Final = ROOT / "docs" / "retrieval.svg"
PER_LINE, AROUND = 10, 16
"""Tokens of a line, and of all else in a prompt with its answer."""
CHANCE: Final = "chance"


def main(folder: Path) -> None:
    """Write both."""
    found = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.glob("lines-*.json"))
    ]
    asked = [{"model": each["model"], **row} for each in found for row in each["rows"]]
    lengths = sorted({row["length"] for row in asked})
    by_chance = [
        {"model": CHANCE, "length": length, "accuracy": chance(length)}
        for length in lengths
    ]
    rows = [*asked, *by_chance]
    facts = {
        "command": "python -m benchmarks.retrieval runs/retrieval",
        "machine": describe_machine(),
        "notes": (folder / "notes.txt").read_text(encoding="utf-8")
        if (folder / "notes.txt").is_file()
        else "",
        "rows": rows,
        "training": {
            name: json.loads(
                (folder / name / "history.json").read_text(encoding="utf-8")
            )
            for name in ("short", "extended", "unextended")
        },
    }
    RESULT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    draw(rows)


def chance(length: int) -> float:
    """Of naming the right one of all lines."""
    return 1 / ((length - AROUND) // PER_LINE)


def accuracies() -> str:
    """Accuracy by length and model."""
    rows = read(RESULT.stem)["rows"]
    found = {(row["model"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    models = {
        "extended": "extended",
        "unextended": "not extended",
        "untrained": "untrained",
        CHANCE: CHANCE,
    }
    return table(
        ("tokens", *models.values()),
        [
            (f"{length:,}", *(_shown(found.get((model, length))) for model in models))
            for length in lengths
        ],
    )


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "items" not in row:
        return f"{row['accuracy']:.1%}"
    return f"{row['accuracy']:.0%} ({row['low']:.0%} to {row['high']:.0%}), n = {row['items']}"


def draw(rows: list[dict[str, Any]]) -> None:
    """A curve per model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    shown = [{"low": None, "items": 0, **row} for row in rows]
    curves = [
        {"model": name, "rows": [row for row in shown if row["model"] == name]}
        for name in names
    ]
    save_picture(curves, PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
