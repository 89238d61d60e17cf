"""``python -m benchmarks.tables`` makes the tables of every page anew."""

from benchmarks.tables import DOCS, PAGES, filled

for name in PAGES:
    page = DOCS / name
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
