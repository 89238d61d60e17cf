"""A step over one prompt with a group of answers: as a tree of segments, and as separate rows."""

from dataclasses import replace
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.core.geometry.tree import Tree
from ringspan.core.mechanisms import TREES, refuse_pairs
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.documents import compare_layouts
from ringspan.plan.planner import make_plan
from ringspan.plan.search import MOST, Question

_PLANNED: Final = (
    "fits", "peak_bytes", "reserve_bytes", "mesh", "micro_batch", "layout", "route", "checkpoint", "step_seconds",
)  # fmt: skip


def compare_group(
    question: Question, group: int, prompt: int, completion: int
) -> dict[str, dict[str, Any]]:
    """Return the ``tree`` and the ``rows`` of ``question.batch`` groups: tokens, pairs of attention, and their plans.

    ``step_seconds`` of a tree that does not fit is None. ConfigError for a group beyond ``MOST``.
    """
    if (
        prompt + group * completion > MOST["length"]
        or group * question.batch > MOST["batch"]
    ):
        raise ConfigError(
            f"--group {group}: at most {MOST['batch']:,} answers of {MOST['length']:,} tokens, prompt and all"
        )
    refuse_pairs(
        question.shape.mechanisms | {TREES: f"--group {group}"},
        question.shape.name,
        "leave --group out, and plan rows of prompt and answer by --length and --batch",
    )
    answer = make_plan(
        replace(question, length=prompt + completion, batch=group * question.batch)
    )
    tokens, pairs = (
        group * (prompt + completion),
        group * CAUSAL.num_pairs(prompt + completion),
    )
    rows = {"tokens": tokens, "pairs": pairs} | {
        name: answer.as_json()[name] for name in _PLANNED
    }
    tree = Tree((prompt, *[completion] * group), (-1, *[0] * group))
    tokens, pairs = (
        sum(tree.lengths),
        CAUSAL.num_pairs(prompt)
        + group * (prompt * completion + CAUSAL.num_pairs(completion)),
    )
    answer = make_plan(replace(question, length=tokens))
    # A tree is one micro-step.
    answer = replace(answer, setting=replace(answer.setting, batch=1))
    answer = replace(answer, memory=training_memory(question.shape, answer.setting))
    found = {"tokens": tokens, "pairs": pairs} | {
        name: answer.as_json()[name] for name in _PLANNED
    }
    if answer.fits:
        timed = compare_layouts(answer.question, answer.setting, tree)[0]
        found |= {
            "layout": timed.layout,
            "route": timed.setting.route,
            "step_seconds": timed.step_seconds,
        }
    else:
        found["step_seconds"] = None
    for name in ("tokens", "pairs"):
        found[name], rows[name] = (
            question.batch * found[name],
            question.batch * rows[name],
        )
    return {"tree": found, "rows": rows}
