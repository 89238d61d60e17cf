"""Plans that are committed (plans.json): what ``ringspan plan`` answers to some 700 questions.

``python -m tests.plan.plans`` asks them again and writes the file: after a change that is meant to change plans, whose
commit then shows which.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import RingspanError
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.plan.cluster.devices import DEVICES
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import MODELS
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.planner import Plan, make_plan
from ringspan.plan.search import Question

FILE: Final = Path(__file__).with_suffix(".json")
COUNT: Final = 700
# Without the one that needs rings of thousands of small devices, which take seconds each.
_NAMES: Final = [
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-3b", "llama-7b", "llama-13b", "llama-30b", "llama-65b",
    "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-0.6b",
    "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
]  # fmt: skip


def windowed(shape: ModelShape, *windows: int | None) -> ModelShape:
    """A shape whose layers have these windows in turn."""
    kinds = (
        replace(kind, mask=LayerMask(window=windows[at % len(windows)]))
        for at, kind in enumerate(shape.kinds)
    )
    return replace(shape, kinds=tuple(kinds))


_SHAPES: Final = {name: MODELS[name] for name in _NAMES} | {
    "windows": windowed(MODELS["llama-3.2-1b"], 4096),
    "some-windows": windowed(MODELS["qwen3-8b"], 1024, 1024, 1024, None),
}
_DEVICE_COUNTS: Final = (1, 2, 3, 4, 8, 12, 16, 32, 64, 512)
_LENGTHS: Final = (1, 4096, 32_768, 131_072, 1_000_003, 1 << 20, 1 << 23, 1 << 26)
# As often as each is here: most people give no route.
_ROUTES: Final = (
    *("auto",) * 12,
    *(
        "ring",
        "bidirectional",
        "double-ring:4",
        "all-gather",
        "pass-q",
        "ulysses",
        "ulysses:4",
        "ulysses:2+all-gather",
    ),
)
_SETTING: Final = (
    *(
        "ring",
        "replicate",
        "tp",
        "batch",
        "layout",
        "route",
        "checkpoint",
        "layers_per_checkpoint",
    ),
    *("feedforward_tokens", "offload", "optimizer_on_host"),
)


def questions() -> Iterator[list[Any]]:
    """Model, device, devices, devices of a node (0: as it is built), length, batch, both dtypes and route."""
    draw = random.Random(0)
    for number in range(COUNT):
        yield [
            list(_SHAPES)[number % len(_SHAPES)],
            list(DEVICES)[number % len(DEVICES)],
            draw.choice(_DEVICE_COUNTS),
            draw.choice((0, 0, 0, 1, 4)),
            draw.choice(_LENGTHS),
            draw.choice((1, 1, 8, 64)),
            draw.choice(("bfloat16", "bfloat16", "float32")),
            draw.choice(("float32", "float32", "bfloat16")),
            draw.choice(_ROUTES),
        ]


def answer(asked: list[Any]) -> list[Any]:
    """The plan in numbers, or the kind of its error. Bytes are exact, times have six digits."""
    shape, device, devices, per_node, length, batch, dtype, parameter_dtype, route = (
        asked
    )
    kind = DEVICES[device]
    try:
        question = Question(
            shape=_SHAPES[shape],
            device=replace(kind, devices_per_node=per_node) if per_node else kind,
            devices=devices,
            length=length,
            batch=batch,
            dtype=dtype,
            parameter_dtype=parameter_dtype,
            route=route,
        )
        return _in_numbers(make_plan(question))
    except RingspanError as error:
        return [type(error).__name__]


def answers(asked: list[list[Any]]) -> list[list[Any]]:
    """The plans of many questions. Processes that end early hand back what schedules of large rings take."""
    with get_context("spawn").Pool(2, maxtasksperchild=4) as pool:
        return pool.map(answer, asked, chunksize=5)


def _in_numbers(plan: Plan) -> list[Any]:
    result, cost, longest = plan.as_json(), plan.cost, plan.longest
    return [
        _fields(plan.setting),
        [longest.length, *_fields(longest)] if longest else [],
        list(result["bytes"].values()),
        result["host_bytes"],
        list(result["link_bytes_per_step"].values()),
        [
            float(f"{value:.6g}")
            for value in (cost.seconds, cost.compute_seconds, cost.flops, cost.mfu)
        ],
    ]


def _fields(setting: Setting) -> list[Any]:
    return [
        int(value) if isinstance(value := getattr(setting, name), bool) else value
        for name in _SETTING
    ]


def main() -> None:
    asked = list(questions())
    lines = (
        json.dumps(row, separators=(",", ":"))
        for row in zip(asked, answers(asked), strict=True)
    )
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
