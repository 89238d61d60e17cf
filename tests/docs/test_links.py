"""Links between pages and to files of the repository lead somewhere on GitHub; building the site checks its own."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, pages, prose


def broken(page: Path) -> list[str]:
    """Targets of links and pictures that do not exist."""
    found: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        exists = path.exists() and path.is_relative_to(ROOT)
        if not exists or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    assert broken(page) == []


def test_what_leads_nowhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.docs.test_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `heading` of [two](page.md)\n[x](other.md) [y](#a-heading) [z](#a-heading-of-two) `[no](link)`\n"
    )
    assert broken(page) == ["other.md", "#a-heading"]
