"""Links lead somewhere on GitHub, and to every page in two clicks; building the site checks its own."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, anchors, pages, prose


def broken(page: Path) -> list[str]:
    """Targets of links and pictures that do not exist."""
    found: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        exists = path.exists() and path.is_relative_to(ROOT)
        if not exists or (
            anchor and path.suffix == ".md" and anchor not in anchors(path)
        ):
            found.append(target)
    return found


@pytest.mark.parametrize(
    "page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(page: Path):
    assert broken(page) == []


def test_what_leads_nowhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.docs.test_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `heading` of [two](page.md)\n[x](other.md) [y](#a-heading) [z](#a-heading-of-two) `[no](link)`\n"
    )
    assert broken(page) == ["other.md", "#a-heading"]


def linked(page: Path, contents: bool = True) -> set[Path]:
    """Pages that a page leads to, by its links and by its tables of contents, which only the site shows."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", prose(page))
    for table in (
        re.findall(
            r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
        )
        if contents
        else ()
    ):
        targets += [
            f"{line}.md"
            for line in table.splitlines()
            if line and not line.startswith(":")
        ]
    found = {(page.parent / target).resolve() for target in targets}
    return {each for each in found if each.is_relative_to(DOCS) and each.exists()}


def within_two_clicks(start: Path, contents: bool) -> set[Path]:
    first = linked(start, contents)
    return {start, *first, *(page for each in first for page in linked(each, contents))}


@pytest.mark.parametrize(
    ("start", "contents"), [("docs/index.md", True), ("README.md", False)]
)
def test_every_page_is_within_two_clicks(start: str, contents: bool):
    assert set(DOCS.rglob("*.md")) - within_two_clicks(ROOT / start, contents) == set()
