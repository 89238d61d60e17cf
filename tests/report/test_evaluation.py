"""The page of ``ringspan eval`` in a browser: axes, legend, and what it says where it is pointed at."""

from xml.etree import ElementTree

import pytest

from ringspan.report.evaluation import save_picture, write_page
from tests.docs.pages import BROWSER

pytest.importorskip("matplotlib")


def row(length: int, accuracy: float, depth: float | None = None) -> dict[str, float]:
    where = {} if depth is None else {"depth": depth}
    return {
        "length": length,
        **where,
        "accuracy": accuracy,
        "low": accuracy * 0.9,
        "high": 0.1 + accuracy * 0.9,
        "items": 20,
    }


def result(model: str, rows: list[dict[str, float]]) -> dict[str, object]:
    skipped = [{"length": 65536, "why": "the model has 8,192 positions"}]
    return {
        "task": "lines",
        "model": model,
        "rows": rows,
        "skipped": skipped,
        "seed": 3,
        "records": "r.jsonl",
    }


CURVES = [
    result("runs/base", [row(1024, 0.5), row(4096, 0.05)]),
    result("runs/tuned", [row(1024, 1.0), row(4096, 0.95)]),
]
MAPS = [
    result(
        model,
        [
            row(length, start + depth / 2, depth)
            for length in (1024, 4096)
            for depth in (0.0, 1.0)
        ],
    )
    for model, start in (("runs/base", 0.3), ("runs/tuned", 0.5))
]


def losses(model: str, first: float, change: float) -> dict[str, object]:
    rows = [
        {
            "start": start,
            "length": stop,
            "loss": loss,
            "bits_per_byte": loss / 3,
            "low": loss - 0.25,
            "high": loss + 0.25,
            "items": 8,
        }
        for at, (start, stop) in enumerate(((1, 64), (64, 1024), (1024, 4096)))
        for loss in [first + change * at]
    ]
    return {**result(model, []), "task": "perplexity", "rows": rows}


LOSSES = [losses("runs/base", 3.0, 0.5), losses("runs/tuned", 2.75, -0.5)]

# What a user would look at, where it is drawn.
SEEN = """() => {
  const picture = document.querySelector("figure svg"), frame = picture.getBoundingClientRect();
  const inside = box => box.width > 0 && box.left >= frame.left - 1 && box.right <= frame.right + 1
    && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
  const texts = [...picture.querySelectorAll("text")];
  const shown = texts.filter(text => inside(text.getBoundingClientRect()));
  return {
    hidden: texts.length - shown.length,
    texts: shown.map(text => text.textContent.trim()),
    curves: [...picture.querySelectorAll(".curve path")].map(path => getComputedStyle(path).stroke),
    pointed: [...picture.querySelectorAll(".spot, .cell")].map(spot => {
      const {x, y, width, height} = spot.querySelector("path").getBoundingClientRect();
      const under = document.elementFromPoint(x + width / 2, y + height / 4);
      return under?.closest("g:has(> title)")?.querySelector("title").textContent;
    }),
  };
}"""


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: the page is not drawn"
)
@pytest.mark.parametrize(
    ("results", "texts", "pointed", "curves"),
    [
        pytest.param(
            CURVES,
            {"accuracy", "length (tokens)", "1K", "4K", "0%", "100%"},
            [
                "1,024 tokens. base: 50.0% (45.0% to 55.0%), n = 20; tuned: 100.0% (90.0% to 100.0%), n = 20"
            ],
            2,
            id="curves",
        ),
        pytest.param(
            MAPS,
            {"depth", "length (tokens)", "1K", "4K", "0%", "100%"},
            [
                "base, 1,024 tokens, depth 100%: 80.0% (72.0% to 82.0%), n = 20",
                "tuned, 1,024 tokens, depth 100%: 100.0% (90.0% to 100.0%), n = 20",
                "tuned, 4,096 tokens, depth 0%: 50.0% (45.0% to 55.0%), n = 20",
            ],
            0,
            id="maps",
        ),
        pytest.param(
            LOSSES,
            {
                "loss (nats per token)",
                "position (tokens)",
                "64",
                "1K",
                "4K",
                "2.0",
                "3.0",
            },
            [
                "64 tokens. base: 3.0000 (2.7500 to 3.2500), n = 8; tuned: 2.7500 (2.5000 to 3.0000), n = 8",
                "4,096 tokens. base: 4.0000 (3.7500 to 4.2500), n = 8; tuned: 1.7500 (1.5000 to 2.0000), n = 8",
            ],
            2,
            id="perplexity",
        ),
    ],
)
def test_the_page_works_in_a_browser(tmp_path, results, texts, pointed, curves):
    sync_api = pytest.importorskip("playwright.sync_api")
    page, said = tmp_path / "page.html", []
    write_page(results, page, "ringspan eval lines base tuned --lengths 1024,4096")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )
        opened = browser.new_page(viewport={"width": 1280, "height": 1400})
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.goto(page.as_uri())
        seen = opened.evaluate(SEEN)
        skipped = opened.get_by_text(
            "Skipped: 65,536 tokens, the model has 8,192 positions."
        ).count()
        seeds = opened.get_by_text(", seed 3").count()
        browser.close()

    # documents are not drawn
    assert seeds == (0 if results is LOSSES else len(results))
    assert said == [] and seen["hidden"] == 0
    assert texts | {"base", "tuned"} <= set(seen["texts"])
    assert len(set(seen["curves"])) == curves
    assert set(pointed) <= set(seen["pointed"])
    cells = [row for result in results for row in result["rows"]]
    assert len(seen["pointed"]) == (
        len(cells) if not curves else len({row["length"] for row in cells})
    )
    assert skipped == len(results)


def test_a_picture_of_curves_is_a_file_of_its_own(tmp_path):
    save_picture(CURVES, tmp_path / "lines.svg")
    drawn = ElementTree.parse(tmp_path / "lines.svg").getroot()
    kinds = [
        group.get("class") for group in drawn.iter("{http://www.w3.org/2000/svg}g")
    ]
    assert kinds.count("curve") == 2 and kinds.count("dot") == 4
