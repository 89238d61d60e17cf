"""Rewards and completions that are given: by models, by functions that fail, on split heads, and in the logs."""

import tempfile
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ringspan.core.errors import PeerMismatch
from ringspan.hf.seams import TrainerSeams
from ringspan.torch.model.layers.modules import local_part
from tests.hf.rollouts import fixed, grpo, large_words
from tests.hf.trainers import SHORT, check, tokenizer, train
from tests.torch.models import config as config_of


def judge() -> Any:
    torch.manual_seed(3)
    made = AutoModelForSequenceClassification.from_config(
        config_of("llama", num_labels=1, pad_token_id=0)
    )
    return made.float()


def judged(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    """GRPO whose completions a model and a function judge; on a ring each rank has a share of that model."""
    given = {
        "reward_funcs": [judge(), large_words],
        "reward_processing_classes": [tokenizer(), None],
    }
    trainer = grpo(mesh, model, ring, folder, given | options)
    if ring is not None:
        weights = list(trainer.reward_funcs[0].parameters())
        assert sum(local_part(one).numel() for one in weights) < 0.6 * sum(
            one.numel() for one in weights
        )
    return trainer


def test_a_reward_model_judges_as_on_one_process(world):
    options = dict([SHORT]) | {"beta": 0.0}
    expected = train(None, judged, "llama", None, options)
    assert min(expected["reward_std"]) > 0
    check(world, 2, judged, "llama", options, expected)


def failing(asked: list[str], trainer: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        raise ValueError("no server at that address")
    return fixed(asked, trainer)


def unjust(completion_ids: list[list[int]], **_: Any) -> list[float]:
    if torch.distributed.get_rank() == 0:
        raise KeyError("answer")
    return large_words(completion_ids)


async def harsh(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that are waited for, but on the second rank."""
    if torch.distributed.get_rank() == 1:
        raise OSError("too many requests")
    return large_words(completion_ids)


def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return large_words(completion_ids)[torch.distributed.get_rank() == 1 :]


class Tokens:
    def _get_tool_suffix_ids(self, tool_messages: Any) -> Any:
        return tool_messages


class Tooled(TrainerSeams, Tokens):
    """The part of a trainer that makes tokens of what tools answer."""


def answered(mesh: Any) -> list[int]:
    """The tokens of an answer that each rank's tool gives otherwise."""
    trainer: Any = Tooled()
    trainer.ring_mesh = mesh
    return trainer._get_tool_suffix_ids([mesh.get_rank()])


def test_what_a_tool_answers_is_that_of_the_first_rank(pool):
    assert pool.run(answered, 2) == [[0], [0]]


def run(mesh: Any, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        grpo(mesh, "llama", {}, folder, dict([SHORT]) | {"beta": 0.0} | options).train()


@pytest.mark.parametrize(
    ("options", "rank", "error", "message"),
    [
        (
            {"rollout_func": failing},
            1,
            ValueError,
            "failing raised on another rank: ValueError: no server",
        ),
        (
            {"reward_funcs": unjust},
            0,
            KeyError,
            "unjust raised on another rank: KeyError: 'answer'",
        ),
        (
            {"reward_funcs": harsh},
            1,
            OSError,
            "harsh raised on another rank: OSError: too many requests",
        ),
        (
            {"reward_funcs": short},
            1,
            ValueError,
            "short raised on another rank: ValueError: ",
        ),
    ],
    ids=["rollout", "reward", "awaited reward", "a reward less"],
)
def test_a_function_that_fails_on_one_rank_raises_on_all(
    world, options, rank, error, message
):
    outcomes = world(2).outcomes(run, 2, options, replicate=2)
    assert type(outcomes[rank]) is error
    for place, other in enumerate(outcomes):
        if place != rank:
            assert (
                isinstance(other, PeerMismatch)
                and message in str(other)
                and "\n" not in str(other)
            )


def logged(
    mesh: Any, ring: dict[str, Any] | None, folder: str, options: dict[str, Any]
) -> list[list[Any]]:
    """The completions that a trainer writes to its folder."""
    given = (
        dict([SHORT])
        | {"beta": 0.0, "log_completions": True, "num_completions_to_print": 0}
        | options
    )
    trainer = grpo(mesh, "llama", ring, folder, given)
    trainer.train()
    names = ["step", "prompt", "completion", "large_words", "advantage"]
    path = f"{folder}/completions/completions_00003.parquet"
    return (
        sorted(pd.read_parquet(path)[names].to_numpy().tolist())
        if trainer.accelerator.is_main_process
        else []
    )


@pytest.mark.long
def test_completions_are_logged_once(world, tmp_path):
    expected = logged(
        None, None, str(tmp_path / "one"), {"per_device_train_batch_size": 4}
    )
    first, *others = world(4).run(
        logged, 4, {}, str(tmp_path / "rings"), {}, replicate=2
    )
    assert others == [[]] * 3 and len(expected) == len(first) == 8
    for found, row in zip(first, expected, strict=True):
        assert found[:3] == row[:3] and found[3:] == pytest.approx(
            row[3:], rel=1e-4, abs=1e-5
        )
