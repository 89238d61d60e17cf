"""The built site in a browser: no errors, readable, nothing wider than a phone, and a search that needs no network."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import BROWSER, DOCS, ROOT

pytestmark = pytest.mark.skipif(
    "RINGSPAN_DOCS" not in os.environ, reason="two minutes; make docs-check"
)
RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
CONTRAST = {"type": "rule", "values": ["color-contrast"]}
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        f"{out}/trees",
    ]
    subprocess.run(
        [*command, str(DOCS), f"{out}/html"], cwd=ROOT, check=True, timeout=180
    )
    return out / "html"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])


def names(site: Path) -> list[str]:
    """Every page that is written, and one of those that show files."""
    written = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    return [
        *sorted(name for name in written if not name.startswith("source/")),
        "source/benchmarks/results.html",
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.timeout(600)
def test_pages_are_readable_and_without_errors(
    site: Path, browser: Any, size: str, theme: str
):
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, offline=True
    )
    # All rules once in either theme and at either width; contrast in all four.
    rules = (
        RULES
        if (size, theme) in (("desktop", "light"), ("phone", "dark"))
        else CONTRAST
    )
    wrong = [
        f"{name}: {fault}"
        for name in names(site)
        for fault in faults(context, site / name, width, rules)
    ]
    context.close()
    assert wrong == []


def faults(
    context: Any, file: Path, width: int, rules: dict[str, Any] = RULES
) -> list[str]:
    """What is wrong with a page in a browser, by axe-core's rules for WCAG 2.1 AA and by what the browser says."""
    from axe_playwright_python.sync_playwright import Axe

    page, found = context.new_page(), list[str]()
    page.on(
        "console",
        lambda said: (
            found.append(said.text) if said.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(request.url))
    page.goto(file.as_uri())
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append(f"wider than {width}")
    # Without its own look at style sheets, which a page that was opened from a folder does not allow.
    result = Axe().run(page, options={"runOnly": rules, "preload": False})
    for violation in result.response["violations"]:
        found += [
            f"{violation['id']} {node['html'][:150]}" for node in violation["nodes"][:3]
        ]
    page.close()
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [("zigzag", "layouts"), ("rs.balanced", "layouts"), ("min_block_tokens", "json")],
)
def test_the_search_finds_without_a_network(
    site: Path, browser: Any, words: str, expected: str
):
    page = browser.new_page(offline=True)
    page.goto((site / "search.html").as_uri() + f"?q={words}")
    # Results come one after the other.
    page.wait_for_selector(
        f"#search-results li a[href*='{expected}']", state="attached", timeout=20_000
    )
    page.close()


@pytest.mark.parametrize(
    ("name", "heading", "first", "last"),
    [
        ("understand/ancestors.html", "Ring Self-Attention", "27.3 MB", "1.66 GB"),
        ("peers.html", "out", "3.4e-07", "3.5e-07"),
        ("results.html", "date", "", None),  # the newest, whichever that is
    ],
)
def test_tables_are_sorted_by_their_headings(
    site: Path, browser: Any, name: str, heading: str, first: str, last: str
):
    page = browser.new_page(offline=True)
    page.goto((site / name).as_uri())
    table = page.locator("article table").first
    column = table.locator("thead th").all_inner_texts().index(heading) + 1
    found: list[list[str]] = []
    for _ in range(2):
        table.locator(f"thead th:nth-child({column}) button").press("Enter")
        cells = [
            text.strip()
            for text in table.locator(f"tbody td:nth-child({column})").all_inner_texts()
        ]
        found.append([text for text in cells if text or not first])
    last = last or max(found[0])
    assert (found[0][0], found[0][-1]) == (first, last)
    assert sorted(found[0]) == sorted(found[1])
    assert (found[1][0], found[1][-1]) == (last, first)
    page.close()


def test_no_page_asks_another_host_for_anything(site: Path):
    asked: list[str] = []
    for page in site.rglob("*.html"):
        for link in re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(https?:[^\"]+)",
            page.read_text(),
        ):
            asked.append(f"{page.name}: {link}")
    assert asked == []


def test_a_page_with_faults_is_found(browser: Any, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><html lang=en><title>x</title><p style='color:#aaa;background:#fff;width:900px'>grey</p>"
        "<img src=nowhere.png><script>console.error('told'); nothing()</script></html>"
    )
    context = browser.new_context(viewport={"width": 390, "height": 800})
    found = "\n".join(faults(context, page, 390))
    context.close()
    for fault in (
        "told",
        "nothing is not defined",
        "nowhere.png",
        "wider than 390",
        "color-contrast",
        "image-alt",
    ):
        assert fault in found
