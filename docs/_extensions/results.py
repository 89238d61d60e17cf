"""Results as tables: ``{ringspan-results}`` lists every file of benchmarks/results with its command and machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


class Results(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        return self.parse_text_to_nodes("\n".join(_files()))


def _files() -> Iterator[str]:
    yield from ("| file | machine |", "| --- | --- |")
    for path in sorted(RESULTS.glob("*.json")):
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        yield f"| [{path.name}](../../benchmarks/results/{path.name}) | {type(found).__name__} |"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("ringspan-results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
