"""The page on which a reader steps through a ring: ``{ringspan-explorer}``.

Everything that it shows is computed here, by the library's own schedule, when the site is built. The script in the
browser draws it, and computes nothing but where on the screen a tile lies.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from explorer.settings import tables

HERE = Path(__file__).parent


def page_html() -> str:
    """Controls, pictures and numbers, with their data, style and script."""
    style, body, script = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("page.css", "page.html", "page.js")
    )
    data = json.dumps(tables(), separators=(",", ":")).replace("</", "<\\/")
    return (
        f"<style>{style}</style>{body}"
        f'<script type="application/json" id="explorer-data">{data}</script><script>{script}</script>'
    )


class Explorer(SphinxDirective):
    """All of it in the page itself, which then needs nothing else."""

    def run(self) -> list[nodes.Node]:
        for name in ("page.css", "page.html", "page.js", "settings.py"):
            self.env.note_dependency(str(HERE / name))
        return [nodes.raw("", page_html(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("ringspan-explorer", Explorer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
