"""The pictures and tables of the pages are those that the library makes today."""

import pytest

from benchmarks.pictures import DOCS, PICTURES, drawn
from benchmarks.tables import PAGES, TABLES, filled


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_the_schedule(name: str):
    assert (DOCS / name).read_text(encoding="utf-8") == drawn(name)


def test_tables_are_made_of_the_results():
    texts = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    assert [name for name, text in texts.items() if filled(text) != text] == [], "run python -m benchmarks.tables"
    assert [name for name in TABLES if not any(f"<!-- table {name} -->" in text for text in texts.values())] == []
