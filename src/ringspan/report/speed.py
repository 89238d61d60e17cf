"""The picture of a run's ranks: what each computes and waits for, over its steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ringspan.core.files.named import why_no_folder
from ringspan.report.drawing import RANK_COLOURS, canvas, dress, line, panel, svg, text

_WIDTH, _HEIGHT, _PLOT = 760.0, 440.0, 150.0
_TITLES: Final = {
    "compute_seconds": "computing in hops, seconds a step",
    "wait_seconds": "waiting in hops, seconds a step",
}
_MOST_LABELS: Final = 16


def draw_speed(
    entries: Sequence[dict[str, Any]], hosts: Sequence[str], path: Path
) -> str | None:
    """Draw the windows of a run's ``speed.jsonl``; return why the picture cannot be written, if it cannot."""
    if reason := why_no_folder(path.parent):
        return reason
    figure, whole = canvas(_WIDTH, _HEIGHT, "computing and waiting of each rank")
    steps = [entry["step"] for entry in entries]
    for number, (name, title) in enumerate(_TITLES.items()):
        top = 40 + number * (_PLOT + 50)
        most = max(max(entry[name]) for entry in entries) or 1.0
        axes = panel(
            figure,
            (70, top),
            (_WIDTH - 220, _PLOT),
            (min(steps) - 1, max(steps) + 1),
            (0, 1.1 * most),
        )
        axes.set_axis_on()
        dress(axes, "step" if number else "", "")
        text(whole, 70, top - 10, title)
        for rank in range(len(hosts)):
            values = [entry[name][rank] for entry in entries]
            line(axes, steps, values, RANK_COLOURS[rank % len(RANK_COLOURS)], 1.6)
    for rank, host in list(enumerate(hosts))[:_MOST_LABELS]:
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
        text(
            whole,
            _WIDTH - 135,
            52 + 18 * rank,
            f"rank {rank} ({host})",
            colour,
            size=11,
        )
    path.write_text(svg(figure), encoding="utf-8")
    return None
