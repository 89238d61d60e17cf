"""The measured form of table 1 of Ring Attention: bytes and seconds by length, a curve per system."""

from typing import TYPE_CHECKING, Any, Final

from ringspan.core.messages.units import shown_bytes
from ringspan.report.drawing import RANK_COLOURS, canvas, dress, line, panel, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS: Final = (
    "Ring Self-Attention",
    "blockwise, one process",
    "Ulysses",
    "ringspan",
)
_COLOURS: Final = dict(
    zip(
        SYSTEMS,
        (RANK_COLOURS[5], RANK_COLOURS[2], RANK_COLOURS[3], RANK_COLOURS[0]),
        strict=True,
    )
)


def ancestor_curves(rows: list[dict[str, Any]]) -> "Figure":
    """Two panels with logarithmic axes: most bytes of a rank, and seconds of forward and backward."""
    spoken = ", ".join(
        f"{name} {shown_bytes(rows[-1]['systems'][name]['peak_bytes'])}"
        for name in SYSTEMS
        if name in rows[-1]["systems"]
    )
    figure, page = canvas(
        640,
        300,
        f"Bytes and seconds by length. At {rows[-1]['length']:,} tokens: {spoken}.",
    )
    for number, (quantity, title, scale) in enumerate(
        (
            ("peak_bytes", "megabytes of a rank at most", 1e6),
            ("seconds", "seconds, forward and backward", 1.0),
        )
    ):
        values = [
            each[quantity] / scale for row in rows for each in row["systems"].values()
        ]
        lengths = [row["length"] for row in rows]
        axes = panel(
            figure,
            (40 + 315 * number, 40),
            (255, 180),
            (lengths[0] / 1.1, lengths[-1] * 1.1),
            (min(values) / 1.3, max(values) * 1.3),
        )
        axes.set_axis_on()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        dress(axes, "tokens", "")
        axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        ticks = [
            value
            for value in (0.01, 0.1, 1, 10, 100, 1000)
            if min(values) <= value <= max(values)
        ]
        axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
        text(page, 40 + 315 * number, 24, title, strong=True)
        for name in SYSTEMS:
            points = [
                (row["length"], row["systems"][name][quantity] / scale)
                for row in rows
                if name in row["systems"]
            ]
            line(axes, *zip(*points, strict=True), _COLOURS[name], 2.5)
    for x, name in zip((40, 195, 375, 480), SYSTEMS, strict=True):
        line(page, (x, x + 18), (282, 282), _COLOURS[name], 3)
        text(page, x + 24, 286, name, size=11)
    return figure
