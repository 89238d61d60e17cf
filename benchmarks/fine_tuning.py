"""The fine-tuning story of Llama 3.1 8B, traced: where a device's memory goes from 1K tokens on one to 512K on four.

Everything is kept and computed in bfloat16. Every number is the peak of ``ringspan plan --trace``'s trace of the real
training step on fake tensors, as rank 0: nothing is computed, so no GPU is needed; half an hour on two cores.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib import pyplot

from ringspan.measure.trace.dry_run import hugging_face_config, thinned, trace
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import MODELS
from ringspan.report.profile_page import COLOURS

RESULT: Final = Path(__file__).parent / "results" / "fine-tuning-trace.json"
DOCS: Final = Path(__file__).parents[1] / "docs"
STAGES_PICTURE, LENGTHS_PICTURE = (
    DOCS / "fine-tuning-stages.svg",
    DOCS / "fine-tuning-lengths.svg",
)
MODEL: Final = "llama-3.1-8b"
K: Final = 1024
GB: Final = 1e9
DEVICE_GB: Final = 80
_MOMENTS: Final = 150

_ONE: Final = Setting(length=K, checkpoint="none", parameter_dtype="bfloat16")
_FOUR: Final = replace(_ONE, ring=4)
# The state is sharded over four devices in all but the first; "a device" means that each has so many tokens of its own,
# which is what holding a whole sequence without a ring takes.
STAGES: Final = {
    "1K, one device": _ONE,
    "1K a device, four devices": replace(_FOUR, length=4 * K),
    "8K a device, four devices": replace(_FOUR, length=32 * K),
    "8K on a ring of four": replace(_FOUR, length=8 * K),
    "8K, ring, attention kept": replace(_FOUR, length=8 * K, checkpoint="attention"),
    "118K, ring, attention kept": replace(
        _FOUR, length=118 * K, checkpoint="attention"
    ),
    "512K, ring, inputs kept": replace(_FOUR, length=512 * K, checkpoint="full"),
    "512K, attention kept, one input of 4": replace(
        _FOUR, length=512 * K, checkpoint="attention", layers_per_checkpoint=4
    ),
}
# Per curve: tokens of the sequence for each thousand of its axis, the policy, and thousands of tokens.
CURVES: Final = {
    "four devices without a ring": (4, "none", (1, 2, 4, 8)),
    "ring of four": (1, "none", (1, 4, 8, 16, 32)),
    "ring, attention kept": (1, "attention", (1, 8, 64, 118, 256)),
    "ring, inputs kept": (1, "full", (256, 512)),
}


def measure(setting: Setting) -> dict[str, Any]:
    """One trace: its peak, bytes by category there, and a thinned timeline."""
    started = time.perf_counter()
    traced = trace(hugging_face_config(MODELS[MODEL], setting.length), setting)
    return {
        "setting": asdict(setting),
        "peak_bytes": traced.peak.total_bytes,
        "phase": traced.peak.phase,
        "bytes": traced.peak.bytes,
        "timeline": [
            {"phase": moment.phase, "operator": moment.index, "bytes": moment.bytes}
            for moment in thinned(traced.moments, _MOMENTS)
        ],
        "trace_seconds": round(time.perf_counter() - started, 1),
    }


def run() -> dict[str, Any]:
    """All traces; a result file that is there is filled up, and no setting is traced twice."""
    result = (
        json.loads(RESULT.read_text())
        if RESULT.exists()
        else {"model": MODEL, "stages": {}, "curves": {}}
    )
    peaks: dict[str, int] = {}
    for name, setting in STAGES.items():
        known = result["stages"].get(name)
        if known is None or Setting(**known["setting"]) != setting:
            result["stages"][name] = _told(name, setting)
            _keep(result)
        peaks[repr(setting)] = result["stages"][name]["peak_bytes"]
    for name, (factor, checkpoint, lengths) in CURVES.items():
        curve = result["curves"].setdefault(name, {})
        for length in lengths:
            setting = replace(_FOUR, length=factor * length * K, checkpoint=checkpoint)
            known = curve.get(str(length)) or peaks.get(repr(setting))
            curve[str(length)] = peaks[repr(setting)] = (
                known or _told(f"{name}, {length}K", setting)["peak_bytes"]
            )
            _keep(result)
    return result


def _told(name: str, setting: Setting) -> dict[str, Any]:
    result = measure(setting)
    print(
        f"{name}: {result['peak_bytes'] / GB:.1f} GB, {result['trace_seconds']} s",
        file=sys.stderr,
        flush=True,
    )
    return result


def _keep(result: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps(result) + "\n")


def draw(result: dict[str, Any]) -> None:
    """Both pictures, the same bytes for the same result."""
    matplotlib.rcParams.update(
        {"svg.hashsalt": "ringspan", "svg.fonttype": "none", "font.size": 9}
    )
    _draw_stages(result["stages"], STAGES_PICTURE)
    _draw_lengths(result["curves"], LENGTHS_PICTURE)


def _draw_stages(stages: dict[str, Any], path: Path) -> None:
    """One panel of stacked areas a stage, all to one scale, operators of a step from left to right."""
    columns = 4
    figure, panels = pyplot.subplots(
        -(-len(stages) // columns), columns, figsize=(12, 6), sharey=True
    )
    for panel in panels.flat[len(stages) :]:
        panel.axis("off")
    for panel, (name, stage) in zip(panels.flat, stages.items(), strict=False):
        points = stage["timeline"]
        first, last = points[0]["operator"], points[-1]["operator"]
        shares = [(point["operator"] - first) / (last - first) for point in points]
        areas = [
            [point["bytes"][category] / GB for point in points] for category in COLOURS
        ]
        panel.stackplot(
            shares,
            areas,
            colors=list(COLOURS.values()),
            labels=list(COLOURS),
            linewidth=0,
        )
        panel.axhline(DEVICE_GB, color="#D00000", linewidth=0.8, linestyle="--")
        panel.set_title(
            f"{name}\n{stage['peak_bytes'] / GB:.1f} GB in {stage['phase']}", fontsize=9
        )
        panel.set_xticks([])
        panel.set_xlim(0, 1)
    for row in panels:
        row[0].set_ylabel("GB")
    figure.legend(
        *panels.flat[0].get_legend_handles_labels(),
        loc="lower center",
        ncols=len(COLOURS),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_lengths(curves: dict[str, dict[str, int]], path: Path) -> None:
    """Peak of a device against the length of the sequence."""
    figure, panel = pyplot.subplots(figsize=(7, 4))
    for (name, points), marker in zip(curves.items(), "osD^", strict=True):
        lengths = sorted(map(int, points))
        panel.plot(
            lengths,
            [points[str(length)] / GB for length in lengths],
            marker=marker,
            markersize=4,
            label=name,
        )
    panel.axhline(
        DEVICE_GB,
        color="#D00000",
        linewidth=0.8,
        linestyle="--",
        label=f"{DEVICE_GB} GB",
    )
    panel.set_xscale("log", base=2)
    ticks = [1, 4, 16, 64, 256]
    panel.set_xticks(ticks, [f"{tick}K" for tick in ticks])
    panel.set(
        xlabel="tokens of a sequence", ylabel="peak of a device, GB", ylim=(0, 110)
    )
    panel.legend(frameon=False, loc="upper left", ncols=3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(RESULT.read_text()) if sys.argv[1:] == ["draw"] else run())
