"""Pictures of bytes per rank by category."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

from matplotlib.figure import Figure

from ringspan.report.demo_page import megabytes
from ringspan.report.drawing import RANK_COLOURS, canvas, rectangle, text


def category_picture(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Bytes per rank by category: a bar per row, its categories from left to right; what all share is said once.

    Args:
        rows: those of ``benchmarks.memory``, with "tokens_per_rank", "checkpoint", "variant" and "bytes" by category;
            None where these have no category, or more than there are colours.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["bytes"]))
    if not names or len(names) > len(RANK_COLOURS):
        return None
    colours = dict(zip(names, RANK_COLOURS, strict=False))
    left, width, row_height, top = 4.0, 420.0, 46.0, 50.0
    longest = max(sum(row["bytes"].values()) for row in rows) or 1
    facts = [
        (
            f"ring {row['ring']}",
            f"{row['tokens_per_rank']:,} tokens per rank",
            row["checkpoint"],
            row["variant"],
        )
        for row in rows
    ]
    # What all rows share is said above them, once.
    differs = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
    spoken = "; ".join(
        f"{row['checkpoint']} {row['variant']}: {megabytes(sum(row['bytes'].values()))}"
        for row in rows
    )
    label = f"Memory per rank by category. {spoken}."
    figure, page = canvas(left + width + 8, top + 14 + len(rows) * row_height, label)
    for index, name in enumerate(names):
        x, y = left + 150 * (index % 3), 4 + 16 * (index // 3)
        rectangle(page, x, y, 10, 10, colours[name])
        text(page, x + 15, y + 10, name, size=11)
    text(
        page,
        left,
        46,
        ", ".join(compress(facts[0], [not each for each in differs])),
        size=11,
    )
    for index, row in enumerate(rows):
        y, x = top + 8 + index * row_height, left
        said = ", ".join(compress(facts[index], differs)) or "in all"
        text(
            page,
            left,
            y + 10,
            f"{said}: {megabytes(sum(row['bytes'].values()))}",
            size=11,
        )
        for name, held in row["bytes"].items():
            extent = held / longest * width
            rectangle(
                page,
                x,
                y + 15,
                extent,
                18,
                colours[name],
                kind="bar",
                title=f"{name}: {megabytes(held)}",
            )
            x += extent
    return figure
