"""TRL's trainers of preferences, rewards and completions on a ring are what they are on one process."""

import tempfile
from typing import Any

import pytest

from ringspan.torch.model.layers.modules import local_part
from tests.cases import long
from tests.hf.preferences import dpo, kto, orpo, reward
from tests.hf.rollouts import grpo, rloo
from tests.hf.trainers import SHORT, check, made, sft, short_run, train

SHARED = {"shared_prefix": True, "min_shared_tokens": 1}


@pytest.mark.parametrize(
    ("make", "model", "options", "ring"),
    [
        *long((dpo, "llama", {"lora": True}, {})),
        (dpo, "llama", {}, SHARED),
        *long((kto, "qwen3-window", {}, {})),
        *long(
            (orpo, "llama", {}, {}),
            (reward, "llama", {"center_rewards_coefficient": 0.1}, {}),
        ),
        (reward, "llama", {}, SHARED),
        (grpo, "llama", {"lora": True, "beta": 0.1, "num_iterations": 2}, {}),
        *long(
            (grpo, "llama", {"lora": True, "beta": 0.1, "num_iterations": 2}, SHARED)
        ),
        (grpo, "qwen3-window", {"beta": 0.0, "sampled": True, "temperature": 0.7}, {}),
        *long(
            (rloo, "llama", {"beta": 0.0}, {}),
            (sft, "hy_v4", {}, {}),
            (grpo, "deepseek_v32", {"beta": 0.0, "sampled": True}, {}),
            (sft, "deepseek_v32", {}, {}),
            (sft, "glm_moe_dsa", {}, {}),
            (grpo, "glm_moe_dsa", {"beta": 0.0, "sampled": True}, {}),
            (grpo, "hy_v4", {"beta": 0.0}, {}),
            (dpo, "mixtral+router", {"ld_alpha": 0.5, "use_weighting": True}, {}),
            (kto, "llama", {}, SHARED),
            (orpo, "llama", {}, SHARED),
            (
                grpo,
                "mixtral+router",
                {"beta": 0.0, "loss_type": "grpo", "top_entropy_quantile": 0.5},
                {},
            ),
            (rloo, "llama", {"beta": 0.0}, SHARED),
            (sft, "llama", {}, SHARED),
        ),
    ],
    ids=lambda value: getattr(
        value, "__name__", "shared" if value is SHARED else str(value)
    ),
)
def test_steps_on_a_ring_equal_one_process(world, make, model, options, ring):
    expected = short_run(make, model, 1, *options.items())
    assert make not in (grpo, rloo) or min(expected["reward_std"]) > 0
    check(world, 2, make, model, dict([SHORT]) | options, expected, ring)


def weights_here(mesh: Any) -> list[float]:
    """The share of its weights that this rank holds: of the model, and of the reference model."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = dpo(mesh, "llama", {}, folder, dict([SHORT]))
        return [
            sum(local_part(weight).numel() for weight in model.parameters())
            / sum(weight.numel() for weight in model.parameters())
            for model in (trainer.model, trainer.ref_model)
        ]


def test_a_reference_model_is_split_as_the_model_is(world):
    for trained, reference in world(2).run(weights_here, 2):
        assert 0.4 < trained < 0.6 and reference == trained


@pytest.mark.long
def test_a_reference_of_the_models_folder_follows_the_model(world, tmp_path):
    made("llama").save_pretrained(tmp_path)
    options = {"place": str(tmp_path), "reference": None}
    options |= {
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
    }
    expected = short_run(dpo, "llama", 1, *options.items())
    still = short_run(dpo, "llama", 1, *options.items(), ("sync_ref_model", False))
    assert (
        expected["loss"][0] == pytest.approx(0.693147, rel=1e-5)
        and expected["loss"][1:] != still["loss"][1:]
    )
    check(world, 2, dpo, "llama", dict([SHORT]) | options, expected)


def test_replicas_normalise_their_rewards_together(world):
    options = {
        "beta": 0.0,
        "num_generations": 4,
        "per_device_train_batch_size": 1,
        "scale_rewards": "batch",
    }
    # Of four completions that are compared with each other each replica has two.
    alone = dict(options) | {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
    }
    expected = train(None, grpo, "llama", None, dict([SHORT]) | alone)
    expected[
        "entropy"
    ] = []  # a mean of means over batches that are accumulated, of other completions there
    check(world, 4, grpo, "llama", dict([SHORT]) | options, expected, replicate=2)


def coefficients(mesh: Any, folder: str) -> list[float]:
    """Of the entropy, step by step, in a run that saves and then in one that resumes."""
    adaptive = {
        "use_adaptive_entropy": True,
        "entropy_coef_delta": 0.01,
        "entropy_target": 100.0,
    }
    given = {
        "beta": 0.0,
        "save_strategy": "steps",
        "save_steps": 1,
        "gradient_accumulation_steps": 1,
    } | adaptive
    grpo(mesh, "llama", {}, folder, given | {"max_steps": 1}).train()
    resumed = grpo(mesh, "llama", {}, folder, given | {"max_steps": 2})
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    return [one["entropy_coef"] for one in resumed.state.log_history if "loss" in one]


@pytest.mark.long
def test_the_coefficient_of_an_entropy_is_resumed(world, tmp_path):
    for found in world(2).run(coefficients, 2, str(tmp_path)):
        assert found == pytest.approx([0.01, 0.02])
