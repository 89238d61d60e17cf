"""The explorer in a browser shows core's numbers, and answers to keys alone."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

from ringspan.core.geometry.ranges import size
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.timing import forward_pass, sent_bytes, timeline, trade
from tests.docs.pages import BROWSER, DOCS

pytest.importorskip("docutils")

NAMED: Final = [
    ("causal", "zigzag", "ring", 4),
    ("causal", "zigzag", "ring", 8),
    ("mixed", "zigzag", "pass-q", 8),
]


@pytest.fixture(scope="module")
def settings() -> Iterator[ModuleType]:
    """Those of the site are a thousand, which takes ten seconds: 150 of them, and those that tests name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS / "_extensions")
        from explorer import settings

        every = [*settings.settings()]
        few = {*random.Random(2).sample(every, 150), *NAMED}
        patch.setattr(
            settings, "settings", lambda: [each for each in every if each in few]
        )
        yield settings


@pytest.fixture(scope="module")
def page(
    settings: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium")
    from explorer import page_html
    from playwright.sync_api import sync_playwright

    file = Path(tmp_path_factory.mktemp("explorer")) / "page.html"
    file.write_text(
        f"<!doctype html><meta charset=utf-8>{page_html()}", encoding="utf-8"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 390, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        yield page
        assert errors == []
        browser.close()


def shown(
    page: Any, setting: tuple[str, str, str, int], link: int, hop: int
) -> tuple[list[list[str]], dict[str, str]]:
    """The rows and the totals that the page has for a setting."""
    names = ("mask", "layout", "route", "ranks")
    asked = dict(zip(names, map(str, setting), strict=True)) | {
        "link": str(link),
        "hop": str(hop),
    }
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
    value, _, unit = text.partition(" ")
    return float(value.replace(",", "")) * {"KB": 1e3, "MB": 1e6}.get(unit, 1)


def some_settings(
    settings: ModuleType, seed: int, plain: int, ulysses: int
) -> list[tuple[str, str, str, int]]:
    """So many at random without Ulysses, and so many with it."""
    chance = random.Random(seed)
    with_ulysses = [
        each for each in settings.settings() if each[2].startswith("ulysses")
    ]
    others = [each for each in settings.settings() if each not in with_ulysses]
    return [*chance.sample(others, plain), *chance.sample(with_ulysses, ulysses)]


def test_numbers_are_those_of_core_for_thirty_settings(page: Any, settings: ModuleType):
    chance = random.Random(2310)
    for setting in some_settings(settings, 2310, 20, 10):
        mask_name, layout_name, route_name, ranks = setting
        mask, route = settings.MASKS[mask_name][1], Route.parse(route_name, ranks)
        layout = settings.layout_of(layout_name, mask, ranks)
        groups = layout.grouped(route.ulysses)  # of one rank each, without Ulysses
        group_of = {
            rank: group
            for group in range(groups.ranks)
            for rank in groups.group_ranks(group)
        }
        parts = [
            settings.part_of(groups, mask, route, group_of[rank])
            for rank in range(ranks)
        ]
        link, hop = (
            chance.choice(settings.LINKS),
            chance.randrange(len(parts[0].schedule.hops)),
        )
        speeds = settings.speeds(link)
        trades = trade(layout, layout, settings.SHAPE, route.ulysses, speeds)
        is_traded = route.ulysses > 1
        rows, totals = shown(page, setting, link, hop + is_traded)
        print(f"{setting}, link {link}, hop {hop}")  # shown if it fails
        ends: list[float] = []
        for rank, (part, row) in enumerate(zip(parts, rows, strict=True)):
            plan, here = part.schedule, part.schedule.hops[hop]
            held_by = (
                "none"
                if row[2] == "none"
                else tuple(map(int, row[2].split(" (")[0].split()))
            )
            assert held_by in ("none", groups.group_ranks(here.owner))
            assert number(row[3]) == here.num_pairs
            assert number(row[6]) == plan.num_pairs
            sent = sent_bytes(
                groups, groups, mask, replace(route, ulysses=1), part.shape, [plan.rank]
            )
            sent += sum(each.inter_node_bytes for each in trades)
            shown_to = 0.05 * (1e3 if sent < 1e6 else 1e6)  # one decimal
            assert number(row[7]) == pytest.approx(sent, abs=1.001 * shown_to)
            if not plan.passes_queries:  # results that go back are sent as well
                place = groups.group_ranks(plan.rank).index(rank)
                sends = [
                    (groups.group_ranks(each.peer)[place], size(each.ranges))
                    for each in here.all_sends
                ]
                told = [
                    (int(peer), int(count))
                    for count, peer in re.findall(r"(\d+) to (\d+)", row[4])
                ]
                assert sorted(told) == sorted(send for send in sends if send[1])
            ends.append(
                [*timeline(part, speeds)][-1].stop
                + sum(each.seconds for each in trades)
            )
            assert number(row[8]) == pytest.approx(
                ends[-1] - plan.num_pairs / route.ulysses, abs=1
            )
        pairs = [part.schedule.num_pairs for part in parts]
        assert (
            totals["busiest rank over the mean"]
            == f"{max(pairs) / sum(pairs) * ranks:.2f}"
        )
        assert number(totals["pairs in all"]) == sum(pairs) / route.ulysses
        assert number(totals["one pass takes"]) == pytest.approx(max(ends), abs=1)
        if is_traded:
            whole = forward_pass(layout, mask, route, settings.SHAPE, speeds)
            assert number(totals["one pass takes"]) == pytest.approx(
                whole.seconds, abs=1
            )


def test_each_pair_of_the_mask_is_drawn_once(page: Any, settings: ModuleType):
    everything = np.arange(settings.LENGTH)
    for setting in [NAMED[2], *some_settings(settings, 7, 13, 5)]:
        shown(page, setting, 8, 0)
        drawn = page.evaluate(
            "[...document.querySelectorAll('#explorer-pairs path:has(title)')].map(path => path.getAttribute('d'))"
        )
        strips = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", "".join(drawn))
        pairs = [
            (int(y), int(x) + i) for x, y, width in strips for i in range(int(width))
        ]
        expected = np.argwhere(
            settings.MASKS[setting[0]][1].dense(everything, everything)
        ).tolist()
        assert sorted(pairs) == sorted(map(tuple, expected)), setting


def test_the_page_answers_to_keys(page: Any):
    shown(page, NAMED[0], 8, 0)
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
