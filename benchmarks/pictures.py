"""The picture of README.md, drawn from a schedule: ``python -m benchmarks.pictures`` writes ``docs/ring.svg``."""

from pathlib import Path

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import causal
from ringspan.report.drawing import svg
from ringspan.report.ring_pictures import ring_picture

if __name__ == "__main__":
    picture = ring_picture(Layout("zigzag", 8192, 4), causal())
    (Path(__file__).parents[1] / "docs" / "ring.svg").write_text(svg(picture) + "\n", encoding="utf-8")
