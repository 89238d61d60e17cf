"""The Markdown pages as a reader of the repository has them: headings, links and blocks of code."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What draws pages here, if there is one.
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)


class Block(NamedTuple):
    """A fenced block of code, and the line where it begins."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def pages() -> list[Path]:
    """README and its siblings, and all of docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and those that are set off by four spaces behind an empty line, as ``text``."""
    fence, language, start, kept = "", "", 0, list[str]()
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate([*lines, ""], 1):
        if fence == "    ":
            if line.startswith("    ") or not line:
                kept.append(line[4:])
                continue
            yield Block(page, start, language, "\n".join(kept).rstrip())
            fence = ""
        if fence:
            if line.strip() == fence:
                yield Block(page, start, language, "\n".join(kept))
                fence = ""
            else:
                kept.append(line)
        elif found := re.match(r"\s*(`{3,}|:{3,})(.*)", line):
            fence, language, start, kept = found[1], found[2].strip(), number, []
        elif (
            line.startswith("    ")
            and line.strip()
            and number > 1
            and not lines[number - 2].strip()
        ):
            fence, language, start, kept = "    ", "text", number, [line[4:]]


def without_blocks(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(
        r"^\s*(`{3,})[^\n]*\n.*?^\s*\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE
    )


def prose(page: Path) -> str:
    """The text without fenced blocks and code in a line."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(page))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to headings."""
    found: set[str] = set()
    text = re.sub(
        r"^(`{3,}).*?^\1",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-"))
    return found
