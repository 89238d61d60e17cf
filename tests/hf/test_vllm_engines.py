"""GRPO and RLOO whose completions engines of vLLM make on the trainer's ranks: as with TRL's own on one process."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ringspan as rs
from ringspan.core.errors import ConfigError, PeerMismatch
from ringspan.hf.vllm import rings_of
from tests.cases import long
from tests.hf.fake_engine import engines
from tests.hf.rollouts import grpo, rloo
from tests.hf.test_vllm import RATIOS, STEPS, close_ratios
from tests.hf.trainers import close, history, made

COLOCATED = STEPS | {"use_vllm": True, "vllm_mode": "colocate"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    made("llama").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def trained(
    mesh: Any, make: Any, ring: dict[str, Any] | None, options: dict[str, Any]
) -> Any:
    """What a trainer logs of some steps, its ratios, and this rank's engine at the end."""
    with tempfile.TemporaryDirectory() as folder, engines():
        trainer = make(mesh, "llama", ring, folder, COLOCATED | options)
        trainer.train()
        found = history(trainer)
        found["eval_loss"] = found["loss"]  # no evaluation
        logs = [one for one in trainer.state.log_history if "loss" in one]
        ratios = [[one.get(name) for name in RATIOS] for one in logs]
        # As TRL does before the next step.
        trainer.vllm_generation.sync_weights()
        engine = trainer.vllm_generation.llm
        return SimpleNamespace(
            found=found,
            ratios=ratios,
            asked=engine.asked,
            given=engine.given,
            loads=engine.loads,
            resets=engine.resets,
            weights={name: x.clone() for name, x in engine.model.state_dict().items()},
        )


@pytest.mark.parametrize(
    ("make", "options", "ranks", "ring", "replicate", "size"),
    [
        (grpo, {}, 2, {}, 1, 1),
        *long(
            (grpo, {}, 2, {}, 1, 2),
            (grpo, {"vllm_enable_sleep_mode": True}, 2, {}, 1, 1),
            (grpo, {"lora": True}, 2, {}, 1, 2),
            (grpo, {}, 2, {"shared_prefix": True, "min_shared_tokens": 1}, 1, 1),
            (rloo, {}, 2, {}, 1, 1),
            (grpo, {}, 4, {}, 2, 1),
            (grpo, {}, 4, {}, 2, 2),
            (grpo, {}, 4, {}, 1, 2),
            (rloo, {"vllm_enable_sleep_mode": True}, 4, {}, 2, 2),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_steps_with_engines_equal_one_process(
    world, checkpoint, make, options, ranks, ring, replicate, size
):
    options = options | {"place": checkpoint}
    alone = {
        "per_device_train_batch_size": 2 * replicate,
        "per_device_eval_batch_size": 2 * replicate,
    }
    expected = trained(None, make, None, options | alone)
    assert min(expected.found["reward_std"]) > 0
    options["vllm_tensor_parallel_size"] = size
    every = world(ranks).run(trained, ranks, make, ring, options, replicate=replicate)
    for one in every:
        if replicate > 1:  # a mean of means over other batches
            one.found["entropy"] = expected.found["entropy"]
        close(one.found, expected.found)
        close_ratios(one.ratios, expected.ratios, logs_none=make is rloo)
        # One update before each step, and the last one here.
        assert one.loads == one.resets
    # Each prompt is asked once, by the first ranks of the engines together.
    for start in range(0, ranks, size):
        group = every[start : start + size]
        assert all(one.asked == group[0].asked for one in group)
        assert {one.given["seed"] for one in group} == {start // size}
        assert {one.given["tensor_parallel_size"] for one in group} == {size}
    by_engine = [ids for one in every[::size] for ids in one.asked]
    assert sorted(by_engine) == sorted(expected.asked)
    # The first rank alone has the trainer's whole weights; TRL merges an adapter as the ring does.
    last = expected.weights if "lora" in options else every[0].found["weights"]
    for one in every:
        for name, tensor in last.items():
            near = expected.weights[name]
            assert (one.weights[name] - near).abs().max() < 1e-5 * near.abs().max()
            assert "lora" in options or torch.equal(one.weights[name], tensor), name


def ended(
    mesh: Any, place: str, fails_at: str | None, options: dict[str, Any]
) -> list[list[int]]:
    """Train with an engine that fails on rank 1; return what it was asked."""
    fails_at = fails_at if dist.get_rank() == 1 else None
    with tempfile.TemporaryDirectory() as folder, engines(fails_at):
        given = COLOCATED | {"place": place} | options
        trainer = grpo(mesh, "llama", {}, folder, given)
        trainer.train()
        return trainer.vllm_generation.llm.asked


def of_four_bits(mesh: Any, checkpoint: str, pre_quantized: bool) -> Any:
    """Train an adapter over packed weights; return the engine's quantization, logs, weights, and the trainer's."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype=torch.float32
    )
    model.hf_quantizer.pre_quantized = pre_quantized
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False
    lora: Any = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    )
    model.is_loaded_in_4bit = model.is_quantized = False
    with tempfile.TemporaryDirectory() as folder, engines():
        given = COLOCATED | {"place": lora, "max_steps": 2}
        trainer = grpo(mesh, "llama", {}, folder, given)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        engine = trainer.vllm_generation.llm
        told = dict(rs.named_weights(trainer.model, everywhere=True))
        logs = [one for one in trainer.state.log_history if "loss" in one]
        largest = [one[RATIOS[1]] for one in logs]
        return (
            engine.given["quantization"],
            largest,
            engine.model.state_dict(),
            told,
        )


@pytest.mark.long
def test_an_engine_of_packed_weights_has_plain_ones(world, checkpoint):
    every = world(2).run(of_four_bits, 2, checkpoint, False)
    for quantization, largest, weights, told in every:
        assert quantization is None
        assert max(largest) < 1e-4 and len(largest) == 2
        assert all(torch.equal(weights[name], x) for name, x in told.items())


@pytest.mark.long
def test_engines_of_a_packed_folder_are_refused(world, checkpoint):
    for error in world(2).outcomes(of_four_bits, 2, checkpoint, True):
        assert type(error) is ConfigError
        assert "model has packed weights, and an engine of vllm_mode='c" in str(error)


@pytest.mark.long
def test_a_ring_with_more_engines_than_prompts_trains(world, checkpoint):
    options = {"steps_per_generation": 1, "max_steps": 1}
    every = world(4).run(ended, 4, checkpoint, None, options)
    assert [len(asked) for asked in every] == [2, 2, 0, 0]


@pytest.mark.parametrize("fails_at", ["reload", *long("start", "generate")])
def test_an_engine_that_fails_is_named_on_every_rank(world, checkpoint, fails_at):
    first, other = world(2).outcomes(ended, 2, checkpoint, fails_at, {})
    message = f"no memory to {fails_at}"
    assert type(other) is ValueError and str(other) == message
    assert type(first) is PeerMismatch
    assert str(first) == f"rank 1 failed: ValueError: {message}"


def test_engines_that_do_not_divide_a_ring_are_refused(world, checkpoint):
    options = {"vllm_tensor_parallel_size": 3}
    for error in world(2).outcomes(ended, 2, checkpoint, None, options):
        assert type(error) is ConfigError
        assert str(error) == (
            "vllm_tensor_parallel_size=3 does not divide the 2 ranks of a ring; change it"
        )


def test_an_engine_of_ranks_that_are_no_neighbours_is_refused():
    ranks, names = torch.arange(4).view(2, 2), ("ring", "replicate")
    mesh: Any = SimpleNamespace(mesh=ranks, mesh_dim_names=names)
    assert rings_of(mesh, 1) == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match=r"=2 takes neighbouring ranks.* \[0, 2\]"):
        rings_of(mesh, 2)
    mesh.mesh_dim_names = ("replicate", "ring")
    assert rings_of(mesh, 2) == [[0, 1], [2, 3]]
