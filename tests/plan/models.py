"""Built-in models: ``python -m tests.plan.models`` counts their configs again and writes ``models.json``."""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Final

from ringspan.plan.model import configs
from ringspan.plan.model.shapes import ModelShape

FILE: Final = Path(configs.__file__).with_name("models.json")
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def row_of(shape: ModelShape) -> dict[str, Any]:
    """A shape as the file has it: its distinct layers and their order, without what is as usual."""
    distinct = [*dict.fromkeys(shape.kinds)]
    rows = {
        field.name: getattr(shape, field.name)
        for field in fields(shape)
        if field.name not in ("name", "config")
    }
    rows |= {"kinds": [_given(kind) for kind in distinct]}
    usual = {field.name: field.default for field in fields(shape)}
    order = "".join(_DIGITS[distinct.index(kind)] for kind in shape.kinds)
    return {name: value for name, value in rows.items() if value != usual[name]} | {
        "order": order
    }


def _given(kind: Any) -> dict[str, Any]:
    usual = {
        field.name: field.default
        for field in fields(kind)
        if field.default is not MISSING
    }
    return {
        name: value
        for name, value in asdict(kind).items()
        if name not in usual or getattr(kind, name) != usual[name]
    }


def main() -> None:
    lines = []
    for name, row in json.loads(FILE.read_text()).items():
        row["shape"] = row_of(configs.from_config(row["config"], name))
        lines.append(f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
