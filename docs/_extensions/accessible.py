"""What the theme leaves out for readers without a mouse or a screen: heading levels, and boxes that scroll by keys."""

from typing import Any

from sphinx.application import Sphinx

REPLACED = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
}


def improve(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    for name in ("body", "furo_navigation_tree"):
        text = context.get(name)
        if text:
            for found, better in REPLACED.items():
                text = text.replace(found, better)
            context[name] = text


def setup(app: Sphinx) -> dict[str, Any]:
    # when the theme has made its part
    app.connect("html-page-context", improve, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
