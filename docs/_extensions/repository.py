"""Links to files of the repository that are no pages: on GitHub they open the file, here a page that shows it.

A page is written for each file or folder that is linked to, and for what a linked folder has in it.
"""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
SHOWN = (".py", ".json", ".toml", ".md", ".yaml", ".sh")
SHOWN_BYTES = 100_000  # of a file: what a browser shows without a pause


class RepositoryLinks(SphinxTransform):
    """Before Sphinx takes links to files for downloads, and links to folders for mistakes."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        found: dict[str, set[str]] = self.env.__dict__.setdefault("ringspan_linked", {})
        linked = found[self.env.docname] = set()
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for kind in (addnodes.download_reference, addnodes.pending_xref):
            for link in list(self.document.findall(kind)):
                target = str(link.get("reftarget", ""))
                path = (folder / target.partition("#")[0]).resolve()
                if (
                    not target.startswith("..")
                    or not path.is_relative_to(ROOT)
                    or path.is_relative_to(ROOT / "docs")
                ):
                    continue
                if not path.exists():
                    continue  # Sphinx names what is missing
                name = path.relative_to(ROOT).as_posix()
                linked.add(name)
                up = "../" * self.env.docname.count("/")
                reference = nodes.reference(
                    "", "", refuri=f"{up}source/{name}.html", internal=True
                )
                reference += (
                    link.children[0].children
                    if isinstance(link.children[0], nodes.inline)
                    else link.children
                )
                holder = link.parent
                holder.replace(link, reference)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each linked file, and for each linked folder with its files."""
    waiting = {
        name
        for linked in getattr(app.env, "ringspan_linked", {}).values()
        for name in linked
    }
    done: set[str] = set()
    while waiting:
        name = waiting.pop()
        path = ROOT / name
        done.add(name)
        if path.is_dir():
            inside = sorted(
                each for each in path.iterdir() if not each.name.startswith(("_", "."))
            )
            inside = [each for each in inside if each.is_dir() or each.suffix in SHOWN]
            waiting |= {each.relative_to(ROOT).as_posix() for each in inside} - done
            items = "".join(
                f'<li><a href="{path.name}/{each.name}.html">{each.name}</a></li>'
                for each in inside
            )
            body = f"<ul>{items}</ul>"
        else:
            body = _shown(path)
        title = html.escape(name)
        yield (
            f"source/{name}",
            {"title": title, "body": f"<h1>{title}</h1>\n{body}"},
            "page.html",
        )


def _shown(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    note = ""
    if len(text) > SHOWN_BYTES:
        note = f"<p>The first {SHOWN_BYTES:,} of {len(text):,} characters.</p>"
        text = text[:SHOWN_BYTES]
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return (
        note
        + f'<div class="highlight" tabindex="0">{highlight(text, lexer, HtmlFormatter(nowrap=False))}</div>'
    )


def forget(app: Sphinx, env: Any, docname: str) -> None:
    """A page that is read again may link to other files."""
    env.__dict__.setdefault("ringspan_linked", {}).pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(RepositoryLinks)
    app.connect("html-collect-pages", pages)
    app.connect("env-purge-doc", forget)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
