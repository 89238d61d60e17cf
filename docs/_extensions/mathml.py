"""Formulas as MathML, which browsers draw themselves: no script, and nothing fetched."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _display(self: Any, node: nodes.math_block) -> None:
    self.body.append(
        f'<div class="formula" tabindex="0">{convert(node.astext(), display="block")}</div>'
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    app.connect(
        "config-inited",
        lambda _, config: setattr(config, "html_math_renderer", "mathml"),
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
