"""GRPO and RLOO on a ring are what they are on one process, of completions that are given and of those they make."""

from typing import Any

import pytest

from tests.cases import long
from tests.hf.rollouts import grpo, rloo
from tests.hf.trainers import SHORT, check, short_run, train


@pytest.mark.parametrize(
    ("make", "model", "options"),
    [
        (grpo, "llama", {"lora": True, "beta": 0.1, "num_iterations": 2}),
        (grpo, "qwen3-window", {"beta": 0.0, "sampled": True, "temperature": 0.7}),
        (rloo, "llama", {"beta": 0.0}),
        *long(
            (grpo, "llama", {"beta": 0.0}),
            (grpo, "mixtral+router", {"beta": 0.0, "loss_type": "grpo", "top_entropy_quantile": 0.5}),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_steps_on_a_ring_equal_one_process(world, make, model, options):
    expected = short_run(make, model, 1, *options.items())
    assert min(expected["reward_std"]) > 0
    check(world, 2, make, model, dict([SHORT]) | options, expected)


def test_replicas_normalise_their_rewards_together(world):
    options = {"beta": 0.0, "num_generations": 4, "per_device_train_batch_size": 1, "scale_rewards": "batch"}
    # Of four completions that are compared with each other each replica has two.
    alone = dict(options) | {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
    expected = train(None, grpo, "llama", None, dict([SHORT]) | alone)
    expected["entropy"] = []  # a mean of means over batches that are accumulated, of other completions there
    check(world, 4, grpo, "llama", dict([SHORT]) | options, expected, replicate=2)


def coefficients(mesh: Any, folder: str) -> list[float]:
    """Of the entropy, step by step, in a run that saves and then in one that resumes."""
    adaptive = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.01, "entropy_target": 100.0}
    given = {"beta": 0.0, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1} | adaptive
    grpo(mesh, "llama", {}, folder, given | {"max_steps": 1}).train()
    resumed = grpo(mesh, "llama", {}, folder, given | {"max_steps": 2})
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    return [one["entropy_coef"] for one in resumed.state.log_history if "loss" in one]


@pytest.mark.long
def test_the_coefficient_of_an_entropy_is_resumed(world, tmp_path):
    for found in world(2).run(coefficients, 2, str(tmp_path)):
        assert found == pytest.approx([0.01, 0.02])
