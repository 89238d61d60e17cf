"""A profile as pictures: a page with hover and zoom, and PNG files."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringspan.core.messages.extras import require
from ringspan.core.names import CATEGORIES
from ringspan.measure.trace.profile import RankProfile
from ringspan.report import page as html
from ringspan.report.drawing import INK, PAPER, SOFT, dress, line, rectangle, spots, svg
from ringspan.report.page import element

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stacked from the bottom in the order of CATEGORIES; safe for the colour-blind (Okabe and Ito's palette).
COLOURS: Final = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#56B4E9",
    "activations": "#009E73",
    "temporaries": "#F0E442",
    "communication": "#CC79A7",
}
_HOP, _TRANSFER, _GRADIENT, _WAIT = "#0072B2", "#56B4E9", "#CC79A7", "#D00000"
_LANE: Final = 0.8
# Moments on a page, over all ranks: 60 ranks then take less than 5 MB.
_MOMENTS: Final = 4000


def write_report(profiles: list[RankProfile], folder: Path, title: str) -> list[Path]:
    """Write ``report.html``, ``memory.png``, ``timeline.png`` and ``profile.json``; return their paths."""
    require("a profile's report", "matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        folder / name
        for name in ("report.html", "memory.png", "timeline.png", "profile.json")
    ]
    paths[0].write_text(page(profiles, title), encoding="utf-8")
    memory_figure(profiles[:4]).savefig(paths[1], dpi=120)
    timeline_figure(profiles[:8]).savefig(paths[2], dpi=120)
    paths[3].write_text(
        json.dumps([profile.as_json() for profile in profiles]), encoding="utf-8"
    )
    return paths


_STYLE: Final = """
main { max-width: 1200px } .scroll { overflow: auto; max-height: 90vh } input { cursor: pointer }
svg { max-width: none; width: calc(100% * var(--zoom, 1)) }
"""
# The page's only script: a picture scales to any size, and the browser scrolls it.
_ZOOM: Final = (
    '<label>zoom <input type="range" min="1" max="20" step="0.5" value="1" '
    "oninput=\"this.closest('section').style.setProperty('--zoom', this.value)\"></label>"
)


def page(profiles: list[RankProfile], title: str) -> str:
    """Return the page with each rank's memory; the more ranks, the fewer moments of each."""
    most = max(40, _MOMENTS // len(profiles))
    ranks = (
        f'<details name="rank"{" open" * (number == 0)}><summary>rank {profile.rank}</summary>'
        f'<div class="scroll">{svg(memory_figure([profile], most))}</div></details>'
        for number, profile in enumerate(profiles)
    )
    about_memory = (
        "Bytes of every living tensor by what it is for, after each operator. The tracker slows this step down: read "
        "shares of the time, not seconds. Point at a moment for its bytes."
    )
    about_time = (
        "Upper lane of each rank: computing with a block, and in red the time for which it waited. Lower lane: keys "
        "and values, or their gradients, from posting to the end of the wait for them. Each rank counts from its own "
        f"beginning of the step; dotted lines are those of rank {profiles[0].rank}. Point at a bar for what it is."
    )
    timeline = element("div", svg(timeline_figure(profiles)), class_="scroll")
    rows = [
        (
            p.rank,
            p.device,
            *(
                f"{x:,.1f}"
                for x in (
                    p.peak_bytes / 1e6,
                    1e3 * p.step_seconds,
                    1e3 * p.exposed_seconds,
                )
            ),
        )
        for p in profiles
    ]
    return html.page(
        title,
        html.table(
            rows,
            ("rank", "device", "peak MB", "step ms", "waited ms"),
            class_="numbers",
        ),
        html.section(
            "Memory over one step",
            element("p", about_memory),
            _ZOOM,
            *ranks,
            name="memory",
        ),
        html.section(
            "One step, hop by hop",
            element("p", about_time),
            _ZOOM,
            timeline,
            name="timeline",
        ),
        style=_STYLE,
        has_script=True,
    )


def memory_figure(profiles: Sequence[RankProfile], most: int = _MOMENTS) -> "Figure":
    """Draw a panel of stacked areas per rank, each of at most ``most`` moments."""
    figure, panels = _panels(
        len(profiles), 2.6 * len(profiles) + 0.6, "Memory over one step by category."
    )
    for axes, profile in zip(panels, profiles, strict=True):
        shown = _peaks(
            [
                sum(at)
                for at in zip(
                    *(profile.memory[name] for name in CATEGORIES), strict=True
                )
            ],
            most,
        )
        times = [1e3 * profile.memory["seconds"][at] for at in shown]
        areas = {
            name: [profile.memory[name][at] / 1e6 for at in shown]
            for name in CATEGORIES
        }
        _stack(axes, times, areas)
        _mark(axes, profile.memory_phases, 1e3)
        dress(axes, "ms, in a step slowed by the tracker", f"rank {profile.rank}: MB")
        titles = (
            "\n".join(
                [f"{profile.memory['phase'][at]}, {time:,.1f} ms"]
                + [
                    f"{name} {areas[name][number]:,.2f} MB"
                    for name in reversed(CATEGORIES)
                ]
            )
            for number, (at, time) in enumerate(zip(shown, times, strict=True))
        )
        spots(axes, [*times, max(times[-1], axes.get_xlim()[1])], titles)
    _legend(figure, panels[0])
    return figure


def _peaks(values: Sequence[float], most: int) -> list[int]:
    num_runs = min(most, len(values))
    bounds = [run * len(values) // num_runs for run in range(num_runs + 1)]
    return [
        max(range(start, stop), key=values.__getitem__)
        for start, stop in pairwise(bounds)
    ]


def timeline_figure(profiles: Sequence[RankProfile]) -> "Figure":
    """Draw two lanes per rank: computed hops, with waits in red over them, and transfers."""
    names = [
        f"rank {p.rank} {lane}" for p in profiles for lane in ("computes", "transfers")
    ]
    figure, [axes] = _panels(1, len(profiles) + 1.6, "One step, hop by hop.", width=12)
    axes.set(
        xlim=(0, 1e3 * max(p.step_seconds for p in profiles)),
        ylim=(len(names) - 0.5, -0.5),
    )
    for kind, colour, bars in _lanes(profiles):
        axes.bar([0], [0], color=colour, label=kind, clip_on=False)  # for the legend
        for lane, start, end, words in bars:
            title = f"{words}\n{1e3 * (end - start):.2f} ms from {1e3 * start:.2f}"
            place = (
                axes,
                1e3 * start,
                lane - _LANE / 2,
                1e3 * (end - start),
                _LANE,
                colour,
            )
            rectangle(*place, edge=PAPER, edge_width=0.3, kind="time", title=title)
    _mark(axes, profiles[0].phases, 1e3)
    axes.set_yticks(range(len(names)), names)
    dress(axes, "ms", "")
    axes.grid(visible=False)
    _legend(figure, axes)
    return figure


Bar = tuple[int, float, float, str]
"""Lane, start, end, words."""


def _lanes(profiles: Sequence[RankProfile]) -> Iterator[tuple[str, str, list[Bar]]]:
    """Yield (kind, colour, bars) of a timeline, with two lanes per rank.

    Rank n computes hops, and waits, in lane 2n; transfers of keys and values, and of their gradients, are in lane 2n +
    1.
    """
    hops: list[Bar] = []
    blocks: dict[bool, list[Bar]] = {False: [], True: []}
    waits: list[Bar] = []
    for number, profile in enumerate(profiles):
        lane = 2 * number
        for hop in profile.visits:
            text = f"block of rank {hop['owner']}, {hop['num_pairs']:,} pairs"
            hops.append((lane, hop["started"], hop["ended"], text))
        for transfer in profile.passages:
            text = f"hop {transfer['hop']}: {transfer['sent_bytes']:,} bytes out, {transfer['received_bytes']:,} in"
            blocks[transfer["is_gradient"]].append(
                (lane + 1, transfer["posted"], transfer["arrived"], text)
            )
            waits.append(
                (lane, transfer["waited"], transfer["arrived"], f"waits, {text}")
            )
    yield "computes a hop", _HOP, hops
    yield "keys and values", _TRANSFER, blocks[False]
    yield "their gradients", _GRADIENT, blocks[True]
    yield "waits", _WAIT, waits


def trace_picture(
    timeline: Sequence[Mapping[str, Any]], budget_bytes: int, title: str, path: Path
) -> None:
    """Draw stacked areas of a traced step, operator by operator, under the line of the device's memory."""
    # ``timeline`` is that of ``dryrun.summary``; the path's suffix sets the format.
    figure, [axes] = _panels(1, 4, title)
    first = timeline[0]["operator"]
    operators = [moment["operator"] - first for moment in timeline]
    _stack(
        axes,
        operators,
        {
            name: [moment["bytes"][name] / 1e9 for moment in timeline]
            for name in CATEGORIES
        },
    )
    axes.axhline(
        budget_bytes / 1e9,
        color=_WAIT,
        linestyle="--",
        linewidth=1,
        label="the device has",
        clip_on=False,
    )
    axes.set(
        xlim=(0, operators[-1] + 1),
        ylim=(0, 1.05 * max(budget_bytes / 1e9, axes.get_ylim()[1])),
    )
    begins = {
        moment["phase"]: moment["operator"] - first for moment in reversed(timeline)
    }
    _mark(axes, begins.items())
    dress(axes, "operators of one step", "GB")
    figure.suptitle(title, fontsize=10, color=INK, parse_math=False)
    _legend(figure, axes, below=True)
    figure.savefig(path, dpi=120)


def _panels(
    count: int, height: float, label: str, width: float = 10
) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", label=label)
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _stack(
    axes: "Axes", x: Sequence[float], areas: Mapping[str, Sequence[float]]
) -> None:
    axes.stackplot(
        x,
        list(areas.values()),
        labels=list(areas),
        colors=list(COLOURS.values()),
        step="post",
        clip_on=False,
    )
    axes.set(xlim=(x[0], max(x[-1], x[0] + 1e-9)), ylim=(0, None))


def _legend(figure: "Figure", axes: "Axes", *, below: bool = False) -> None:
    handles, labels = axes.get_legend_handles_labels()
    place = "outside lower center" if below else "outside upper center"
    looks = {"frameon": False, "labelcolor": INK, "fontsize": 9, "handlelength": 1.5}
    figure.legend(handles, labels, loc=place, ncols=len(labels), **looks)


def _mark(axes: "Axes", marks: Iterable[tuple[str, float]], scale: float = 1) -> None:
    limits = axes.get_ylim()
    for name, at in ((name, scale * at) for name, at in marks):
        line(axes, (at, at), limits, INK, 0.8, linestyle=":")
        axes.annotate(
            name,
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            va="bottom",
            rotation=30,
            color=SOFT,
            rotation_mode="anchor",
        )
