"""Tables of pages, computed or read from ``benchmarks/results``: ``python -m benchmarks.tables`` fills them in.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; a test fails when a page has another one.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from ringspan.core.messages.units import shown_bandwidth, shown_speed
from ringspan.plan.cluster.hardware import device, min_block_tokens

DOCS: Final = Path(__file__).parents[1] / "docs"
_GROUPED: Final = 4  # query heads on a key/value head


def overlap_devices() -> str:
    """From how many tokens per rank on a ring hides, by data sheets."""
    rows: list[Sequence[object]] = []
    for name in ("a100-80gb", "h100", "b200", "tpu-v5p"):
        each = device(name)
        inside, between = each.intra_node_bandwidth, each.inter_node_bandwidth
        tokens = (min_block_tokens(each.flops, inside), min_block_tokens(each.flops, between))
        links = [shown_bandwidth(inside), shown_bandwidth(between)]
        counts = [f"{count:,.0f}" for count in (*tokens, tokens[1] / _GROUPED)]
        rows.append((each.title, shown_speed(each.flops), *links, *counts))
    return table(
        ("device", "F", "B in a node", "B between nodes", "c in a node", "c between nodes", "c, grouped heads"), rows
    )


TABLES: Final[dict[str, Callable[[], str]]] = {"overlap-devices": overlap_devices}
PAGES: Final = ("understand/overlap.md",)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table whose first ``left`` columns are words, and the others numbers."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def filled(text: str) -> str:
    """A page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        return f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table ([a-z-]+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in PAGES:
        page = DOCS / name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
