"""The files of ``benchmarks/results``: what is in them, and a table of all of them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
# Of files that do not say it themselves.
_COMMANDS: Final = {
    "faults": "make faults",
    "fine": "python benchmarks/fine_tuning.py",
    "jax": "python benchmarks/jax_attention.py",
    "weights": "python benchmarks/weights.py",
    "weights-models": "make models",
}
_COMMITTED: Final = {"recurrence-second-pass-cpu": "2026-11-25"}
"""When the figures of a machine whose file has no date were committed."""


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table whose first ``left`` columns are words, and the others numbers."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def files() -> str:
    """Every file of results: what made it, where and when."""
    rows: list[Sequence[object]] = []
    for path in sorted(RESULTS.glob("*.json")):
        found = list(_facts(read(path.stem)))
        commands = list(
            dict.fromkeys(each["command"] for each in found if "command" in each)
        )
        machines = [each["machine"] for each in found if "machine" in each]
        first = (
            commands[0]
            if commands
            else _COMMANDS.get(path.stem) or _COMMANDS[path.stem.partition("-")[0]]
        )
        made = f"`{first.partition(' (')[0]}`" + (
            f" and {len(commands) - 1} more" if len(commands) > 1 else ""
        )
        processor = (
            machines[0]["processor"].replace("(R)", "").replace(" Processor", "")
            if machines
            else "any"
        )
        machine = (
            f"{processor}, torch {machines[0]['torch'].partition('+')[0]}"
            if machines
            else processor
        )
        dates = sorted({each["date"] for each in machines if "date" in each})
        committed = (
            f"{_COMMITTED[path.stem]} (committed)" if path.stem in _COMMITTED else ""
        )
        rows.append(
            (
                f"[{path.stem}](../benchmarks/results/{path.name})",
                made,
                machine,
                (dates or [committed])[-1],
            )
        )
    return table(("file", "command", "machine", "date"), rows, left=4)


def _facts(found: Any) -> Iterator[dict[str, Any]]:
    """The objects of a file that name a command or a machine."""
    if isinstance(found, list):
        for each in found:
            yield from _facts(each)
    elif isinstance(found, dict):
        if "command" in found or "machine" in found:
            yield found
        for each in found.values():
            if isinstance(each, dict):
                yield from _facts(each)
