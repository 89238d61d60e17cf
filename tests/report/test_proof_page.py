"""The page of a proof: its table, and a picture of the positions that are wrong."""

import pytest

from ringspan.proof.run import Proof, Row
from ringspan.report.page import write_whole
from ringspan.report.proof_page import proof_page
from tests.docs.pages import BROWSER

MESH = {"replicate": 1, "ring": 2}


def proof_of(*rows: Row, **others) -> Proof:
    return Proof("a <model>", 2, 1000, MESH, {"layout": "striped"}, [*rows], **others)


def test_an_exact_proof_has_a_table_and_no_picture():
    text = proof_page(proof_of(Row("one sequence", 1e-12, "the loss"), seconds=7.4))
    for expected in ("Exact, in 7 s.", "a &lt;model&gt;", "1.0e-12", "layout=striped"):
        assert expected in text
    assert "<svg" not in text


def different() -> Proof:
    wrong = Row(
        "padding on both sides",
        0.3,
        "the loss",
        place="the output of layers.1",
        tokens=6,
        wrong=[[], [2, 3, 5]],
    )
    refused = Row("generation", refused="it does not write")
    return proof_of(wrong, refused, smallest={"comm_dtype": "int8"})


def test_a_difference_has_a_square_for_each_position():
    text = proof_page(different())
    assert text.count("<rect") == 12
    assert text.count(": wrong</title>") == 3 == text.count("<path")
    assert 'aria-label="3 tokens of 2 rows are wrong"' in text
    for expected in (
        "3.0e-01, too far",
        "refused: it does not write",
        "first at the output of layers.1.",
        "comm_dtype=int8",
    ):
        assert expected in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_picture_is_seen_in_a_browser(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "proof.html"
    write_whole(path, proof_page(different()))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )
        opened = browser.new_page(viewport={"width": 1000, "height": 900})
        opened.goto(path.as_uri())
        box = opened.locator("svg.positions").bounding_box()
        squares = opened.locator("svg.positions rect")
        count, first = squares.count(), squares.first.bounding_box()
        browser.close()
    assert count == 12
    assert box is not None and first is not None
    assert box["width"] > 300 and first["width"] > 5
