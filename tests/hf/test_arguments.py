"""Every argument of a trainer means on a ring what it means on one process, or raises; none is forgotten."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hf.arguments import CONFIGS, NOT_TRIED, TRIED, named, of
from tests.hf.preferences import dpo
from tests.hf.rollouts import grpo
from tests.hf.trainers import SCORES, SHORT, TOLERANCE, close, history, train

# What is logged of time and of memory, and what is a mean over other logits there (docs/trainers.md).
NOT_COMPARED = ("runtime", "per_second", "step_time", "mem_", "logits/")


@pytest.mark.parametrize("make", CONFIGS, ids=lambda make: make.__name__)
def test_every_argument_has_a_place(make):
    assert not of(make) - named(make), (
        "try it in tests/hf/arguments.py, or refuse it in ringspan/hf/refusals.py"
    )


def test_what_another_test_is_said_to_have_is_there():
    for reason, names in NOT_TRIED.items():
        if files := re.findall(r"test_\w+\.py", reason):
            source = "".join(
                Path(__file__).with_name(file).read_text() for file in files
            )
            assert [
                name for name in names if not re.search(rf"\b{name}\b", source)
            ] == [], reason


def everything(trainer: Any) -> tuple[Any, list[Any], int]:
    """What ``history`` has, what else was logged, and how many tokens were seen."""
    logs = [
        {
            name: value
            for name, value in one.items()
            if name not in SCORES and not any(p in name for p in NOT_COMPARED)
        }
        for one in trainer.state.log_history
    ]
    return history(trainer), logs, trainer.state.num_input_tokens_seen


def _shown(value: Any) -> str:
    """Name a function, or an object that is called: processes that share the tests need equal names."""
    if not callable(value):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def cases() -> Iterator[Any]:
    """One case for each line of the table; the first of ``SFTTrainer`` is one of ``make test``."""
    for make, runs in TRIED.items():
        for options in runs:
            shown = (f"{name}={_shown(value)}" for name, value in options.items())
            name = f"{make.__name__}-{', '.join(shown)}"
            is_tried = options is runs[0] and make.__name__ == "sft"
            yield pytest.param(
                make, options, marks=() if is_tried else pytest.mark.long, id=name
            )


def close_in_everything(
    found: tuple[Any, list[Any], int], expected: tuple[Any, list[Any], int]
) -> None:
    close(found[0], expected[0])
    assert found[2] == expected[2] and len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        assert one == {
            name: pytest.approx(value, rel=TOLERANCE, abs=1e-6)
            for name, value in other.items()
        }


@pytest.mark.parametrize(("make", "options"), cases())
def test_an_argument_has_the_meaning_of_one_process(world, make, options):
    options = dict([SHORT]) | options
    # accelerate changes what it is given
    expected = train(None, make, "llama", None, copy.deepcopy(options), everything)
    for found in world(2).run(train, 2, make, "llama", {}, options, everything):
        close_in_everything(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((dpo, {"loss_type": [name]}) for name in ("sft", "aot", "aot_unpaired")),
        (grpo, {"beta": 0.0, "loss_type": "bnpo"}),
        (grpo, {"beta": 0.0, "entropy_coef": 0.05, "top_entropy_quantile": 0.3}),
        (grpo, {"beta": 0.0, "delta": 1.5, "num_iterations": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_of_each_process_is_of_each_ring(world, make, options):
    """Means, orders and quantiles of a process's batch, which TRL then averages: not those of one process."""
    options = dict([SHORT]) | options
    expected = world(2).run(train, 2, make, "llama", None, options, everything)[0]
    for found in world(4).run(
        train, 4, make, "llama", {}, options, everything, replicate=2
    ):
        close_in_everything(found, expected)
