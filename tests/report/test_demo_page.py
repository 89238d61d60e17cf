"""The report is valid, self-contained and complete; its pictures show the pairs that the schedule computes."""

import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Path_

from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import (
    Mask,
    causal,
    documents,
    full,
    prefix_lm,
    sliding_window,
)
from ringspan.core.geometry.ranges import size
from ringspan.core.schedule.schedule import make_schedule
from ringspan.report import page as page_module
from ringspan.report.demo_page import write_report
from ringspan.report.drawing import RANK_COLOURS, canvas, svg, text
from ringspan.report.ring_pictures import ring_picture, travel_picture

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "</td></table><script>alert('x')</script><img src=\"https://example.org/a.png\" onerror=x> & \x00 \ud800"

MASKS = [causal(), full(), sliding_window(7), prefix_lm(9), documents([11, 20, 6])]
LAYOUTS = [
    Layout("contiguous", 41, 4),
    Layout("zigzag", 48, 3),
    Layout("zigzag", 41, 2),
    Layout("zigzag", 37, 1),
    Layout("striped", 41, 3),
]


def result() -> dict[str, Any]:
    """What a demo hands to its report, with numbers that each occur once."""
    gradients = [
        {
            "name": f"model.layers.{i}.self_attn.q_proj.weight",
            "norm": 0.125 + i,
            "relative_difference": (i + 1) * 1.1e-8,
        }
        for i in range(12)
    ]
    machine = {
        "processor": "Some Processor 9000",
        "cores": 13,
        "device": "cpu",
        "cuda": None,
    }
    model = {
        "type": "llama",
        "parameters": 4_739_328,
        "layers": 5,
        "hidden_size": 257,
        "heads": 4,
        "kv_heads": 2,
    }
    proof = {
        "loss_one_process": 8.3456789,
        "loss_ring": 8.3456791,
        "loss_relative_difference": 2.4e-8,
    }
    step = {
        "grad_norm": 1.125,
        "lr": 3e-4,
        "matmul_utilization": 0.421,
        "peak_bytes": 912_345_678,
        "seconds": 4.03,
    }
    return {
        "command": "ringspan demo --ranks 2",
        "machine": machine
        | {"torch": "2.99.1", "python": "3.11.77", "ringspan": "0.1.55"},
        "model": model | {"vocabulary": 4097},
        "data": {
            "documents": 812,
            "tokens": 4_123_456,
            "description": "source of something",
        },
        "ranks": 2,
        "sequence_length_tokens": 8192,
        "layout": "zigzag",
        "dtype": "float32",
        "metrics": [
            step
            | {
                "step": number,
                "loss": 8.25 - number / 10,
                "tokens_per_second": 2000.0 + number,
            }
            for number in range(1, 25)
        ],
        "evaluation": [{"step": 24, "eval_loss": 5.8125}],
        "proof": proof
        | {
            "ranks": 2,
            "length": 8192,
            "gradients": gradients,
            "worst_error": {"ring": 3.5e-6, "one_process": 3.25e-6},
        },
        "memory": [
            {
                "ring": ring,
                "tokens_per_rank": 8192 // ring,
                "activation_bytes": 423_456_789 // ring + 10**6 * ring,
            }
            for ring in (1, 2, 4)
        ],
        "seconds": {"data": 10.5, "train": 120.5, "proof": 20.5, "memory": 24.5},
    }


class Page(HTMLParser):
    """Checks that tags balance, and collects the text, the attributes and the names of the tags."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def written(result: dict[str, Any], folder: Path) -> str:
    path = folder / "new" / "report.html"
    write_report(result, path)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def test_the_page_is_balanced_and_has_everything_measured(tmp_path: Path):
    page = Page(written(result(), tmp_path))
    assert page.tags.count("h1") == 1 and page.tags.count("svg") == 5
    expected = [
        "trained for 24 steps on sequences of 8,192 tokens, each split over 2 processes",
        "loss went from 8.150 to 5.850",
        "4.7 million parameters",
        "no gradient by more than 1.3e-07",
        "activations take 109.9 MB per rank on a ring of 4, 424.5 MB on one",
        *(
            "8.3456789",
            "8.3456791",
            "2.4e-08",
            "worst gradient: model.layers.11.self_attn.q_proj.weight",
        ),
        *(
            "train 5.850",
            "eval 5.812",
            "5.8125",
            "2,012",
            "42.1%",
            "912.3 MB",
            "912,345,678",
            "3.00e-04",
        ),
        *("4.03", "1.125"),
        *(
            "424.5 MB",
            "213.7 MB",
            "109.9 MB",
            "ideal 212.2 MB",
            "ideal 106.1 MB",
            "2,048 tokens per rank",
        ),
        *(
            "Some Processor 9000",
            "13",
            "2.99.1",
            "3.11.77",
            "0.1.55",
            "llama",
            "4,739,328",
            "257",
            "4,097",
        ),
        *(
            "812",
            "4,123,456",
            "source of something",
            "float32",
            "zigzag",
            "10.5",
            "120.5",
            "20.5",
            "24.5",
            "176.0",
        ),
        *(
            "ringspan demo --ranks 2",
            "zigzag layout, causal mask, 2 ranks",
            "contiguous layout, causal mask, 2 ranks",
        ),
    ]
    assert [value for value in expected if value not in page.text] == []
    for row in result()["proof"]["gradients"]:
        assert row["name"] in page.text
        assert (
            f"{row['norm']:.3e}" in page.text
            and f"{row['relative_difference']:.1e}" in page.text
        )


def test_the_page_needs_nothing_from_outside_and_is_accessible(tmp_path: Path):
    source = written(result(), tmp_path)
    page = Page(source)
    assert "https://" not in source
    assert source.count("http://") == source.count('xmlns="http://www.w3.org/2000/svg"')
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    assert "url(" not in source and "@import" not in source
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert page.attributes.count(("role", "img")) == page.tags.count("svg")
    assert any("rank 0 50.0 %, rank 1 50.0 %" in label for label in labels)
    assert any("rank 0 25.0 %, rank 1 75.0 %" in label for label in labels)
    assert "prefers-color-scheme: dark" in source and ("lang", "en") in page.attributes


def hostile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: hostile(inner) for key, inner in value.items()} | {
            HOSTILE: HOSTILE
        }
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def test_hostile_text_stays_text(tmp_path: Path):
    made = result() | {"command": HOSTILE}
    made |= {part: hostile(made[part]) for part in ("machine", "model", "data")}
    made["proof"]["gradients"][3]["name"] = HOSTILE
    page = Page(written(made, tmp_path))
    assert not {"script", "img"} & set(page.tags)
    assert "onerror" not in {name for name, _ in page.attributes}
    assert "<script>alert('x')</script>" in page.text and "\x00" not in page.text


def drawn(picture: Figure, kind: str) -> list[tuple[PathPatch, str]]:
    """Everything of a kind in a picture, in the order of drawing, and what it says when pointed at."""
    patches = [
        patch
        for axes in picture.axes
        for patch in axes.patches
        if isinstance(patch, PathPatch)
    ]
    return [
        (patch, patch.get_gid().partition("|")[2])
        for patch in patches
        if f"{patch.get_gid()}".startswith(f"{kind}|")
    ]


def numbers(title: str, *words: str) -> tuple[int, ...]:
    return tuple(int(re.search(rf"\b{word} (\d+)", title)[1]) for word in words)  # type: ignore[index]


def polygons(picture: Figure) -> dict[tuple[int, int], list[np.ndarray]]:
    """Corners (key, query) of everything drawn for a (rank, hop), in positions."""
    found: dict[tuple[int, int], list[np.ndarray]] = {}
    for patch, title in drawn(picture, "tile"):
        rank, hop = numbers(title, "rank", "hop")
        assert to_hex(patch.get_facecolor()) == RANK_COLOURS[rank].lower()
        # A subpath ends with its first corner again.
        path = patch.get_path()
        assert path.codes is not None
        ends = np.flatnonzero(path.codes == Path_.CLOSEPOLY)
        found[rank, hop] = [
            part[:-1] for part in np.split(path.vertices, ends + 1)[:-1]
        ]
    return found


def width(patch: PathPatch) -> float:
    return float(np.ptp(patch.get_path().vertices[:, 0]))


def covered(corners: np.ndarray, length: int) -> np.ndarray:
    """Which cells (query, key) have their middle inside of the polygon: even-odd crossings of a ray to the right."""
    x, y = np.meshgrid(np.arange(length) + 0.5, np.arange(length) + 0.5)
    inside = np.zeros((length, length), dtype=bool)
    for (x0, y0), (x1, y1) in pairwise([*corners, corners[0]]):
        if y0 != y1:
            inside ^= ((y0 > y) != (y1 > y)) & (
                x < x0 + (y - y0) / (y1 - y0) * (x1 - x0)
            )
    return inside


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.ranks}"
)
def test_each_pair_is_drawn_once_in_its_rank_colour_and_hop(layout: Layout, mask: Mask):
    length = layout.length
    times = np.zeros((length, length), dtype=int)
    seen = np.full((length, length, 2), -1)
    for (rank, hop), shapes in polygons(ring_picture(layout, mask)).items():
        for shape in shapes:
            inside = covered(shape, length)
            times += inside
            seen[inside] = rank, hop
    allowed = mask.dense(np.arange(length), np.arange(length))
    np.testing.assert_array_equal(times, allowed)
    owner = np.empty(layout.padded_length, dtype=int)
    for rank in range(layout.ranks):
        owner[layout.positions(rank)] = rank
    hop_of = {
        (rank, h.owner): h.index
        for rank in range(layout.ranks)
        for h in make_schedule(layout, mask, rank).hops
    }
    for query, key in np.argwhere(allowed):
        rank = owner[query]
        assert seen[query, key].tolist() == [rank, hop_of[rank, owner[key]]]


@pytest.mark.parametrize(
    "layout", [Layout("striped", 4096, 2), Layout("zigzag", 4096, 9)], ids=str
)
def test_what_could_not_be_seen_is_refused(layout: Layout):
    with pytest.raises(LayoutError, match="draw at most"):
        ring_picture(layout, causal())


@pytest.mark.parametrize(
    "mask",
    [causal(), full(), sliding_window(1500), documents([3000, 3000, 2192])],
    ids=str,
)
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_the_travel_picture_fills_what_arrives(name: Any, mask: Mask):
    layout = Layout(name, 8192, 4)
    picture = travel_picture(layout, mask)
    bars: dict[tuple[int, int], list[PathPatch]] = defaultdict(list)
    for patch, title in drawn(picture, "carried"):
        hop, rank = numbers(title, "hop", "rank")
        bars[rank, hop].append(patch)
    whole = sum(map(width, bars[0, 0]))
    for rank in range(layout.ranks):
        for hop in make_schedule(layout, mask, rank).hops:
            here = bars[rank, hop.index]
            expected = (
                size(hop.arrives.ranges) / layout.tokens_per_rank if hop.index else 1.0
            )
            assert sum(map(width, here)) / whole == pytest.approx(expected, abs=1e-3)
            assert {to_hex(bar.get_facecolor()) for bar in here} <= {
                RANK_COLOURS[hop.owner].lower()
            }
    words = "".join(ElementTree.fromstring(svg(picture)).itertext())
    assert (
        f"{sum(make_schedule(layout, mask, rank).sent_tokens for rank in range(4)):,} tokens sent"
        in words
    )


def test_names_with_dollars_and_markup_are_drawn_as_they_are():
    figure, page = canvas(100, 20, "<$a$>")
    text(page, 0, 10, "<$a$> & $b")
    written = ElementTree.fromstring(svg(figure))
    assert (
        "".join(
            word
            for element in written.iter(f"{SVG}text")
            for word in element.itertext()
        )
        == "<$a$> & $b"
    )
    assert written.attrib["aria-label"] == "<$a$>"


def test_without_matplotlib_the_page_says_what_its_pictures_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        page_module, "installed", lambda package: package != "matplotlib"
    )
    page = Page(written(result(), tmp_path))
    assert (
        page.text.count(
            "The picture needs the extra ringspan[report]: pip install '.[report]' in a checkout of ringspan."
        )
        == 5
    )
    assert "svg" not in page.tags and "5.8125" in page.text
