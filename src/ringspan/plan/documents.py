"""Cost of a step of packed documents on each layout and route, from their own schedules."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.tree import Tree
from ringspan.core.messages.lines import one_line
from ringspan.core.names import BATCH_LAYOUT_NAMES, BatchLayoutName
from ringspan.core.schedule.choice import WORTH_IT
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.timing import Pass, Speeds
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cost.chosen import chosen_passes
from ringspan.plan.cost.passes import Passes, repeated, slowest_passes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.search import Question

FORMS: Final = "give a .json file with a list of lengths, or lognormal:MEDIAN or lognormal:MEDIAN,SIGMA"
# Default spread of lognormal lengths: one in twenty is five times as long as the median.
_SIGMA: Final = 1.0
_SHORTEST: Final = 16
_MOST_RANKS: Final = 64  # schedules of larger rings take minutes
# Routes timed in addition to the plan's: from neighbour to neighbour, and straight from the owner.
_ROUTES: Final = (
    "ring",
    "all-gather",
)


@dataclass(frozen=True)
class LayoutCost:
    layout: BatchLayoutName
    setting: Setting
    """Step without its layout, which only documents make."""
    most_work_over_mean: float
    received_bytes: float
    """Attention's bytes on the rank that takes longest, in one step."""
    step_seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "route": self.setting.route,
            "micro_batch": self.setting.batch,
            "most_work_over_mean": self.most_work_over_mean,
            "received_bytes_per_step": round(self.received_bytes),
            "step_seconds": self.step_seconds,
        }


def read_documents(text: str, length: int) -> tuple[int, ...]:
    """Return documents' lengths that fill ``length``: a file's, repeated, or lognormal; ConfigError for other text."""
    name, _, numbers = text.partition(":")
    lengths = _lognormal(text, numbers) if name == "lognormal" else _read(Path(text))
    found: list[int] = []
    left = length
    while left:
        found.append(min(left, next(lengths)))
        left -= found[-1]
    return tuple(found)


def compare_layouts(
    question: Question, setting: Setting, lengths: tuple[int, ...] | Tree
) -> list[LayoutCost]:
    """Return a plan's step on every layout and route for documents or a tree, the fastest first (striped: 3% later)."""
    option = "--group" if isinstance(lengths, Tree) else "--documents"
    if question.shape.has_states or question.shape.sees:
        what = "towers" if question.shape.sees else "layers with states"
        raise UnsupportedError(
            f"{option}: {question.shape.name} has {what}, which are timed for whole sequences alone; leave it out"
        )
    if setting.ring > _MOST_RANKS:
        raise ConfigError(
            f"{option} is for rings of up to {_MOST_RANKS} ranks, and this plan has {setting.ring}; ask for fewer "
            "devices, or compare layouts with rs.balanced and python -m benchmarks.layouts"
        )
    routes = dict.fromkeys(
        (
            setting.route,
            *(_ROUTES if question.route == "auto" and setting.ring > 1 else ()),
        )
    )
    rows: list[LayoutCost] = []
    for name in BATCH_LAYOUT_NAMES:
        split = batch_layout(name, question.length, setting.ring, lengths)
        work = _work(question, split, lengths)
        for route in routes:
            # A balanced layout fits one sequence, and has no Ulysses groups.
            way = replace(
                setting, route=route, batch=1 if name == "balanced" else setting.batch
            )
            if (name == "balanced" and way.way.ulysses > 1) or not question.fits(way):
                continue
            cost = question.step_cost(way, _passes_of(split, lengths))
            rows.append(
                LayoutCost(
                    name,
                    way,
                    max(work) * len(work) / sum(work),
                    cost.ring_bytes,
                    cost.seconds,
                )
            )
    return sorted(
        rows,
        key=lambda row: row.step_seconds / (WORTH_IT if row.layout == "striped" else 1),
    )


def _work(
    question: Question, split: Layout, lengths: tuple[int, ...] | Tree
) -> list[int]:
    masks = Counter(question.shape.layer_masks)
    seen = {mask: mask.in_text(split.length, lengths) for mask in masks}
    return [
        sum(
            count * make_schedule(split, seen[mask], rank).num_pairs
            for mask, count in masks.items()
        )
        for rank in range(split.ranks)
    ]


def _passes_of(split: Layout, lengths: tuple[int, ...] | Tree) -> Passes:
    @lru_cache
    def passes(
        layout: str,
        length: int,
        ranks: int,
        mask: LayerMask,
        route: str,
        shape: Shape,
        speeds: Speeds,
    ) -> tuple[Pass, Pass]:
        seen, way = mask.in_text(length, lengths), Route.parse(route, ranks)
        if shape.index is not None:
            return chosen_passes(split, seen, shape, speeds)
        alone = replace(shape, batch=1)
        one = slowest_passes(split, seen, way, alone, speeds)
        return repeated(shape.batch, one)

    return passes


def _lognormal(text: str, numbers: str) -> Iterator[int]:
    parts = numbers.split(",")
    try:
        median, sigma = float(parts[0]), float(parts[1]) if len(parts) == 2 else _SIGMA
        if len(parts) > 2 or not (1 <= median < float("inf") and 0 <= sigma < 10):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--documents {text}: needs a median of at least 1, a sigma below 10; {FORMS}"
        ) from None
    generator = np.random.default_rng(0)
    while True:
        yield max(_SHORTEST, int(generator.lognormal(np.log(median), sigma)))


def _read(path: Path) -> Iterator[int]:
    try:
        lengths = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--documents {path}: {one_line(error)}; {FORMS}") from error
    if (
        not isinstance(lengths, list)
        or not lengths
        or not all(type(n) is int and n > 0 for n in lengths)
    ):
        raise ConfigError(
            f"--documents {path}: is no list of whole numbers above 0; {FORMS}"
        )
    while True:
        yield from lengths
