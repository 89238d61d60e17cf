"""A profile as pictures: an interactive HTML file that needs nothing else, and PNG files.

plotly.js travels inside of the file, compressed, and is unpacked by the browser; nothing is fetched.
"""

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringspan.core.extras import require
from ringspan.core.names import CATEGORIES
from ringspan.measure.trace.profile import RankProfile

if TYPE_CHECKING:
    import plotly.graph_objects as go

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


def write_report(profiles: list[RankProfile], folder: Path, title: str) -> list[Path]:
    """Write ``report.html``, ``memory.png``, ``timeline.png`` and ``profile.json`` into a folder; their paths.

    Raises:
        MissingExtraError: there is no plotly or no matplotlib.
    """
    require("a profile's report", "matplotlib", "plotly")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("report.html", "memory.png", "timeline.png", "profile.json")]
    paths[0].write_text(page(profiles, title), encoding="utf-8")
    memory_png(profiles, paths[1])
    timeline_png(profiles, paths[2])
    paths[3].write_text(json.dumps([profile.as_json() for profile in profiles]), encoding="utf-8")
    return paths


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 24px auto; padding: 0 16px }}
table {{ border-collapse: collapse }} td, th {{ padding: 2px 14px 2px 0; text-align: right }}
.chart {{ width: 100% }}</style></head><body>
<h1>{title}</h1>{table}
<h2>Memory over one step</h2><p>Bytes of every living tensor by what it is for, after each operator. The tracker slows
this step down: read shares of the time, not seconds.</p><div id="memory" class="chart"></div>
<h2>One step, hop by hop</h2><p>Upper lane of a rank: computing with a block, and in red the time for which it waited.
Lower lane: keys and values, or their gradients, from posting to the end of the wait for them.
Each rank counts from its own beginning of the step; dotted lines are those of rank {first}.</p>
<div id="timeline" class="chart"></div>
<script id="figures" type="application/json">{figures}</script>
<script>
async function draw() {{
  const packed = Uint8Array.from(atob("{plotly}"), c => c.charCodeAt(0));
  const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const [name, figure] of Object.entries(figures))
    await Plotly.newPlot(name, figure.data, figure.layout, {{responsive: true, displaylogo: false}});
  document.body.dataset.drawn = "yes";
}}
draw();
</script></body></html>
"""


def page(profiles: list[RankProfile], title: str) -> str:
    """The interactive report; under 5 MB for a few hundred ranks."""
    from plotly.offline import get_plotlyjs

    figures = {"memory": memory_figure(profiles), "timeline": timeline_figure(profiles)}
    together = ",".join(f'"{name}":{figure.to_json()}' for name, figure in figures.items())
    return _PAGE.format(
        title=escape(title),
        table=_table(profiles),
        first=profiles[0].rank,
        figures="{" + together.replace("</", "<\\/") + "}",
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    )


def _table(profiles: list[RankProfile]) -> str:
    rows = "".join(
        f"<tr><td>{p.rank}</td><td>{escape(p.device)}</td><td>{p.peak_bytes / 1e6:,.1f}</td>"
        f"<td>{1e3 * p.step_seconds:,.1f}</td><td>{1e3 * p.exposed_seconds:,.1f}</td></tr>"
        for p in profiles
    )
    heads = "<tr><th>rank</th><th>device</th><th>peak MB</th><th>step ms</th><th>waited ms</th></tr>"
    return f"<table>{heads}{rows}</table>"


def memory_figure(profiles: list[RankProfile]) -> "go.Figure":
    """Stacked areas of one rank at a time, chosen from a menu."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for number, profile in enumerate(profiles):
        times = [1e3 * moment for moment in profile.memory["seconds"]]
        for name in CATEGORIES:
            figure.add_scatter(
                x=times,
                y=[round(b / 1e6, 3) for b in profile.memory[name]],
                name=name,
                mode="lines",
                line={"width": 0.5, "color": COLOURS[name], "shape": "hv"},
                stackgroup=f"rank {profile.rank}",
                visible=number == 0,
                hovertemplate="%{y:,.1f} MB",
            )
    buttons = [
        {
            "label": f"rank {profile.rank}",
            "method": "update",
            "args": [
                {"visible": [number == other for other in range(len(profiles)) for _ in CATEGORIES]},
                _marks(profile.memory_phases),
            ],
        }
        for number, profile in enumerate(profiles)
    ]
    figure.update_layout(
        height=460,
        hovermode="x unified",
        xaxis={"title": {"text": "ms"}},
        yaxis={"title": {"text": "MB"}, "rangemode": "tozero"},
        updatemenus=[{"buttons": buttons, "x": 1.02, "xanchor": "left", "y": 0.4}],
        **_marks(profiles[0].memory_phases),
    )
    return figure


def _marks(phases: list[tuple[str, float]]) -> dict[str, Any]:
    """A dotted line and a word where each phase begins."""
    lines = [
        {"type": "line", "x0": 1e3 * at, "x1": 1e3 * at, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dot"}}
        for _, at in phases
    ]
    words = [
        {
            "x": 1e3 * at,
            "y": 1.0,
            "yref": "paper",
            "text": name,
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "bottom",
        }
        | {"textangle": -30}
        for name, at in phases
    ]
    return {"shapes": lines, "annotations": words}


def timeline_figure(profiles: list[RankProfile]) -> "go.Figure":
    """Two lanes a rank: hops computed, with waits in red over them, and blocks under way."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for kind, colour, bars in _lanes(profiles):
        figure.add_bar(
            orientation="h",
            name=kind,
            marker={"color": colour},
            width=_LANE,
            y=[lane for lane, *_ in bars],
            base=[1e3 * start for _, start, _, _ in bars],
            x=[1e3 * (end - start) for _, start, end, _ in bars],
            customdata=[text for *_, text in bars],
            hovertemplate="%{customdata}<br>%{x:.2f} ms from %{base:.2f}",
        )
    names = [f"rank {p.rank} {lane}" for p in profiles for lane in ("computes", "transfers")]
    figure.update_layout(
        height=200 + 60 * len(profiles),
        barmode="overlay",
        xaxis={"title": {"text": "ms"}},
        yaxis={"tickvals": list(range(len(names))), "ticktext": names, "autorange": "reversed"},
        **_marks(profiles[0].phases),
    )
    return figure


Bar = tuple[int, float, float, str]
"""Lane, start, end, words."""


def _lanes(profiles: list[RankProfile]) -> Iterator[tuple[str, str, list[Bar]]]:
    """Kind, colour and bars; what comes later is drawn over what came before."""
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
            blocks[transfer["is_gradient"]].append((lane + 1, transfer["posted"], transfer["arrived"], text))
            waits.append((lane, transfer["waited"], transfer["arrived"], f"waits, {text}"))
    yield "computes a hop", _HOP, hops
    yield "keys and values", _TRANSFER, blocks[False]
    yield "their gradients", _GRADIENT, blocks[True]
    yield "waits", _WAIT, waits


def memory_png(profiles: list[RankProfile], path: Path) -> None:
    """A panel of stacked areas for each of at most four ranks."""
    from matplotlib.figure import Figure

    shown = profiles[:4]
    figure = Figure(figsize=(10, 2.6 * len(shown) + 0.6), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for panel, profile in zip(panels, shown, strict=True):
        times = [1e3 * moment for moment in profile.memory["seconds"]]
        areas = [[b / 1e6 for b in profile.memory[name]] for name in CATEGORIES]
        panel.stackplot(times, areas, labels=CATEGORIES, colors=list(COLOURS.values()), step="post")
        _mark(panel, _milliseconds(profile.memory_phases))
        panel.set_ylabel(f"rank {profile.rank}: MB")
    panels[-1].set_xlabel("ms, in a step slowed by the tracker")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(CATEGORIES), frameon=False)
    figure.savefig(path, dpi=120)


def trace_picture(timeline: Sequence[Mapping[str, Any]], budget_bytes: int, title: str, path: Path) -> None:
    """Stacked areas of a traced step, operator by operator, under the line of what the device has.

    ``timeline`` as in ``dryrun.summary``; the format is that of the path's name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panel = figure.subplots()
    first = timeline[0]["operator"]
    operators = [moment["operator"] - first for moment in timeline]
    areas = [[moment["bytes"][name] / 1e9 for moment in timeline] for name in CATEGORIES]
    panel.stackplot(operators, areas, labels=CATEGORIES, colors=list(COLOURS.values()), step="post")
    panel.axhline(budget_bytes / 1e9, color=_WAIT, linestyle="--", linewidth=1, label="the device has")
    panel.set_xlim(0, operators[-1] + 1)
    panel.set_ylim(bottom=0)
    begins = {moment["phase"]: moment["operator"] - first for moment in reversed(timeline)}
    _mark(panel, begins.items())
    panel.set_xlabel("operators of one step")
    panel.set_ylabel("GB")
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(CATEGORIES) + 1, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def timeline_png(profiles: list[RankProfile], path: Path) -> None:
    """The two lanes of at most eight ranks."""
    from matplotlib.figure import Figure

    shown = profiles[:8]
    figure = Figure(figsize=(12, 1.0 * len(shown) + 1.6), layout="constrained")
    panel = figure.subplots()
    for kind, colour, bars in _lanes(shown):
        starts, widths = [1e3 * b[1] for b in bars], [1e3 * (b[2] - b[1]) for b in bars]
        panel.barh(
            [b[0] for b in bars],
            widths,
            left=starts,
            height=_LANE,
            color=colour,
            edgecolor="white",
            linewidth=0.3,
            label=kind,
        )
    _mark(panel, _milliseconds(shown[0].phases))
    panel.set_yticks(
        range(2 * len(shown)), [f"rank {p.rank} {lane}" for p in shown for lane in ("computes", "transfers")]
    )
    panel.invert_yaxis()
    panel.set_xlabel("ms")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def _milliseconds(phases: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return [(name, 1e3 * at) for name, at in phases]


def _mark(panel: Any, marks: Iterable[tuple[str, float]]) -> None:
    for name, at in marks:
        panel.axvline(at, color="black", linestyle=":", linewidth=0.8)
        panel.annotate(name, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=8, va="bottom", rotation=30)
