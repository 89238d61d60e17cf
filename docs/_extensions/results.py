"""All files of results, read when the site is built: ``{ringspan-results}``."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks.result_files import RESULTS, files


class Results(SphinxDirective):
    """A row for each file: what made it, where and when."""

    def run(self) -> list[nodes.Node]:
        for path in RESULTS.glob("*.json"):
            self.env.note_dependency(str(path))
        found = self.parse_text_to_nodes(files())
        for table in found:
            if isinstance(table, nodes.Element):
                table["classes"].append("results")  # whose dates stay in one line
        return found


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("ringspan-results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
