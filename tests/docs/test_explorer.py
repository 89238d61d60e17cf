"""The explorer in a browser shows core's numbers, and answers to keys alone."""

import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ringspan.core.schedule.events import Part
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.timing import sent_bytes, timeline
from tests.docs.pages import DOCS

pytest.importorskip("docutils")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def settings() -> Iterator[ModuleType]:
    """The module that makes the page's data."""
    folder = str(DOCS / "_extensions")
    sys.path.insert(0, folder)
    try:
        from explorer import settings

        yield settings
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def page(settings: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page in a browser, by itself."""
    if BROWSER is None:
        pytest.skip("no Chromium")
    from explorer import page_html
    from playwright.sync_api import sync_playwright

    file = Path(tmp_path_factory.mktemp("explorer")) / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{page_html()}", encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        yield page
        assert errors == []
        browser.close()


def shown(page: Any, setting: tuple[str, str, str, int], link: int, hop: int) -> tuple[list[list[str]], dict[str, str]]:
    """The rows and the totals that the page has for a setting."""
    names = ("mask", "layout", "route", "ranks")
    asked = dict(zip(names, map(str, setting), strict=True)) | {"link": str(link), "hop": str(hop)}
    page.evaluate("asked => { location.hash = new URLSearchParams(asked); }", asked)
    page.wait_for_function(
        "asked => Object.entries(asked).every(([name, value]) =>"
        " name === 'hop' || document.querySelector(`#explorer select[name=${name}]`).value === value)",
        arg=asked,
    )
    return page.evaluate(
        "[[...document.querySelectorAll('#explorer-table tbody tr')].map(row => [...row.cells].map(c => c.innerText)),"
        "Object.fromEntries([...document.querySelectorAll('#explorer-totals div')].map("
        "pair => [pair.children[0].innerText, pair.children[1].innerText]))]"
    )


def number(text: str) -> float:
    """Of `1,176`, `73.7 KB` or `360 units`."""
    value, _, unit = text.partition(" ")
    return float(value.replace(",", "")) * {"KB": 1e3, "MB": 1e6}.get(unit, 1)


def test_numbers_are_those_of_core_for_fifty_settings(page: Any, settings: ModuleType):
    chance = random.Random(2310)
    for setting in chance.sample(list(settings.settings()), 50):
        mask_name, layout_name, route, ranks = setting
        mask = settings.MASKS[mask_name][1]
        layout = settings.layout_of(layout_name, mask, ranks)
        plans = [make_schedule(layout, mask, rank, route=route) for rank in range(ranks)]
        link, hop = chance.choice(settings.LINKS), chance.randrange(len(plans[0].hops))
        rows, totals = shown(page, setting, link, hop)
        where = f"{setting}, link {link}, hop {hop}"
        for plan, row in zip(plans, rows, strict=True):
            here = plan.hops[hop]
            holder = re.match(r"(\d+) \((\d+) tokens\)", row[2])
            assert row[2] == "none" or (holder and int(holder[1]) == here.owner), where
            assert int(row[3]) == here.num_pairs, where
            assert number(row[6]) == plan.num_pairs, where
            assert number(row[7]) == pytest.approx(
                sent_bytes(layout, layout, mask, route, settings.SHAPE, [plan.rank]), rel=1e-2
            ), where
            if not plan.passes_queries:  # results that go back are sent as well
                assert sum(map(int, re.findall(r"(\d+) to", row[4]))) == sum(
                    stop - start for _, send in here.sends for start, stop in send.ranges
                ), where
        pairs = [plan.num_pairs for plan in plans]
        assert totals["busiest rank over the mean"] == f"{max(pairs) / sum(pairs) * ranks:.2f}", where
        speeds = settings.speeds(link)
        ends = [timeline(Part(plan, settings.SHAPE, tokens=48 // ranks), speeds)[-1].stop for plan in plans]
        assert number(totals["one pass takes"]) == pytest.approx(max(ends), abs=1), where
        waits = [end - plan.num_pairs for end, plan in zip(ends, plans, strict=True)]
        assert [number(row[8]) for row in rows] == pytest.approx(waits, abs=1), where


def test_each_pair_of_the_mask_is_drawn_once(page: Any, settings: ModuleType):
    everything = np.arange(settings.LENGTH)
    chance = random.Random(7)
    for setting in [("mixed", "zigzag", "pass-q", 8), *chance.sample(list(settings.settings()), 15)]:
        shown(page, setting, 8, 0)
        drawn = page.evaluate(
            "[...document.querySelectorAll('#explorer-pairs path:has(title)')].map(path => path.getAttribute('d'))"
        )
        strips = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", "".join(drawn))
        pairs = [(int(y), int(x) + i) for x, y, width in strips for i in range(int(width))]
        expected = np.argwhere(settings.MASKS[setting[0]][1].dense(everything, everything)).tolist()
        assert sorted(pairs) == sorted(map(tuple, expected)), setting


def test_the_page_answers_to_keys(page: Any):
    shown(page, ("causal", "zigzag", "ring", 4), 8, 0)
    page.focus("#explorer-hop")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#explorer-hop-shown") == "2 of 3"
    page.focus("#explorer select[name=ranks]")
    page.keyboard.type("8")
    assert page.locator("#explorer-table tbody tr").count() == 8
    page.focus("#explorer-back")
    page.keyboard.press("Enter")
    assert page.inner_text("#explorer-hop-shown") == "1 of 7"
