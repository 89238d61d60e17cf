"""Output of ``ringspan doctor --watch``: the ranks' speed in a run."""

import json
from pathlib import Path
from typing import Any

from ringspan.cli.console import console, paragraph, table
from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import installed, remedy

_FILE = "speed.jsonl"
_PICTURE = "speed.svg"
_MOST_LINKS = 8


def read_speed(run: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the hosts of a run's ranks, and its windows since the run was last started."""
    path = run / _FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--watch {run}: {path} cannot be read ({error.strerror}); give the folder of a run with watch_speed=true"
        ) from error
    # The last line may be half written, since the run goes on.
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    try:
        found = [json.loads(line) for line in lines]
        starts = [place for place, each in enumerate(found) if "hosts" in each]
        hosts, entries = found[starts[-1]]["hosts"], found[starts[-1] + 1 :]
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"--watch {run}: {path} is not a file of watch_speed; give the folder of another run"
        ) from error
    if not entries:
        raise ConfigError(
            f"--watch {run}: no steps are compared yet; try again after a few steps"
        )
    return hosts, entries


def show_speed(run: Path, **others: object) -> None:
    """Print the latest figures of each rank and who was named, and draw all of them.

    ``others`` are the command's other options, which look at this machine: ConfigError if one is given.
    """
    for name, value in others.items():
        if value:
            raise ConfigError(
                f"--{name} does not go with --watch; leave one of the two out"
            )
    hosts, entries = read_speed(run)
    last, out = entries[-1], console()
    figures = zip(hosts, last["compute_seconds"], last["wait_seconds"], strict=True)
    rows = [
        (str(rank), host, f"{compute:.3g}", f"{wait:.3g}")
        for rank, (host, compute, wait) in enumerate(figures)
    ]
    title = f"step {last['step']}, of {last['step_seconds']:.3g} s"
    table(out, title, ("rank", "host", "computes, s", "waits, s"), rows, numbers=2)
    _show_links(last.get("links", []), hosts)
    lines = [line for entry in entries for line in entry["lines"]]
    for line in lines:
        paragraph(out, line, first="! ", style="yellow")
    if not lines:
        paragraph(out, "no rank or link is slow")
    if not installed("matplotlib"):
        paragraph(out, f"no picture: it needs {remedy('matplotlib')}")
        return
    from ringspan.report.speed import draw_speed

    picture = run / _PICTURE
    reason = draw_speed(entries, hosts, picture)
    paragraph(out, f"no picture: {reason}" if reason else f"picture  {picture}")


def _show_links(links: list[tuple[int, int, float]], hosts: list[str]) -> None:
    """Print the links that receivers wait for most."""
    rows = [
        (
            f"rank {sender} ({hosts[sender]})",
            f"rank {receiver} ({hosts[receiver]})",
            f"{wait:.3g}",
        )
        for sender, receiver, wait in sorted(links, key=lambda link: -link[2])
    ]
    if rows:
        title = "waits for what was already sent"
        table(
            console(), title, ("from", "to", "waits, s"), rows[:_MOST_LINKS], numbers=1
        )
