"""Adapters over frozen weights that torchao has packed: against one process, and by the bytes that a rank has."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, TorchAoConfig

import ringspan as rs
from ringspan.core.errors import UnsupportedError
from tests.torch.model.test_peft import LIMITS, stir
from tests.torch.models import build, check, step

torchao: Any = pytest.importorskip("torchao.quantization")
Int8WeightOnlyConfig, IntxWeightOnlyConfig = (
    torchao.Int8WeightOnlyConfig,
    torchao.IntxWeightOnlyConfig,
)
PerGroup, PerTensor = torchao.granularity.PerGroup, torchao.granularity.PerTensor

BITS = {
    "int8": Int8WeightOnlyConfig(),
    "int8, one scale": Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8, with zero points": IntxWeightOnlyConfig(
        weight_dtype=torch.int8, granularity=PerGroup(32)
    ),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
}


def quantised(
    kind: str = "llama", bits: str = "int8", *, seed: int = 0, **changes: Any
) -> Any:
    model = build(kind, seed, **changes).requires_grad_(False)
    torchao.quantize_(model, BITS[bits])
    return model


def adapted(model: Any, target_modules: Any = "all-linear") -> Any:
    torch.manual_seed(1)
    return stir(
        get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=target_modules)
        )
    )


def trained(found: Any) -> Any:
    """A loss and its gradients, without the parts that only a split model has."""
    loss, gradients = found
    return loss, {
        name: gradient for name, gradient in gradients.items() if gradient is not None
    }


def ring_step(mesh: DeviceMesh, kind: str, bits: str, options: dict[str, Any]) -> Any:
    # Ranks that draw other weights have those of the first.
    model = adapted(quantised(kind, bits, seed=mesh.get_rank()))
    return trained(step(rs.parallelize(model, mesh, **options), mesh))


BLOCKS = {"feedforward_chunk_tokens": 5, "loss_chunk_tokens": 7, "norm_chunk_tokens": 6}


@pytest.mark.parametrize(
    ("kind", "bits", "ranks", "replicate", "options"),
    [
        ("qwen3", "int8, with zero points", 2, 1, {"checkpoint": "none"}),
        ("gemma2", "int4", 2, 1, {"checkpoint": "full"}),
        # which divide neither the rows of a weight nor its scales
        (
            "llama",
            "int4",
            3,
            1,
            BLOCKS,
        ),
        ("llama-tied", "int8", 4, 2, {}),
        ("mistral-window", "int8", 2, 1, {"offload": "activations"}),
    ],
)
def test_adapters_of_packed_weights_train_as_on_one_process(
    pool, kind, bits, ranks, replicate, options
):
    expected = trained(step(adapted(quantised(kind, bits))))
    assert len(expected[1]) > 20
    check(
        pool.run(ring_step, ranks, kind, bits, options, replicate=replicate),
        expected,
        LIMITS,
    )


def with_packed_experts(bits: str) -> Any:
    """An adapter of attention beside experts whose stacked weights are packed."""
    model: Any = build("mixtral", num_local_experts=5).requires_grad_(False)
    model.set_experts_implementation("eager")  # the others multiply no packed weights
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    how = torchao.FqnToConfig(dict.fromkeys(names, BITS[bits]))
    torchao.quantize_(model, how, filter_fn=None)
    return adapted(model, ["q_proj", "o_proj"])


def ring_step_of_experts(mesh: DeviceMesh, bits: str, options: dict[str, Any]) -> Any:
    model = rs.parallelize(with_packed_experts(bits), mesh, **options)
    names = {name for name, _ in model.named_parameters() if ".slices." in name}
    assert any("parametrizations.down_proj.original0" in name for name in names)
    loss, gradients = trained(step(model, mesh))
    plain = {
        name: weight
        for name, weight in rs.named_weights(model, everywhere=True)
        if "experts" in name
    }
    return loss, gradients | plain


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {"expert_slices": 2}), (3, {"expert_slices": 5, "checkpoint": "full"})],
)
def test_packed_experts_are_gathered_in_slices(pool, ranks, options):
    model = with_packed_experts("int8")
    loss, gradients = trained(step(model))
    [whole, *_] = pool.run(named_experts, 1)
    expected = loss, gradients | whole
    found = pool.run(ring_step_of_experts, ranks, "int8", options)
    check(found, expected, LIMITS)


def named_experts(mesh: DeviceMesh) -> Any:
    model = rs.parallelize(with_packed_experts("int8"), mesh)
    named = rs.named_weights(model, everywhere=True)
    return {name: weight for name, weight in named if "experts" in name}


def experts_of_one_scale() -> Any:
    return with_packed_experts("int8, one scale")


def adapted_experts() -> Any:
    model = with_packed_experts("int8").unload()
    how = LoraConfig(r=2, target_parameters=["experts.down_proj"])
    return get_peft_model(model, how)


def from_folder(folder: Path) -> Any:
    torch.manual_seed(4)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", quantization_config=config
    )


def trained_itself() -> Any:
    model = quantised()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    return model


def by_the_whole_batch() -> Any:
    model = build("llama").requires_grad_(False)
    torchao.quantize_(
        model, torchao.Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())
    )
    return model


def refused(mesh: DeviceMesh, make: Any, options: dict[str, Any]) -> None:
    rs.parallelize(make(), mesh, **options)


@pytest.mark.parametrize(
    ("make", "tp", "options", "message"),
    [
        (
            trained_itself,
            1,
            {},
            r"layers.0.mlp.up_proj.weight is packed \(a Int8Tensor\) and would be trained; freeze",
        ),
        (
            by_the_whole_batch,
            1,
            {},
            r"q_proj, quantised with its activations, mixes tokens.*PerRow",
        ),
        (
            experts_of_one_scale,
            1,
            {"expert_slices": 2},
            r"layers.0.mlp.experts has weights that are packed across experts; use expert_slices=1",
        ),
        (
            adapted_experts,
            1,
            {"expert_slices": 2},
            r"layers.0.mlp.experts.* has packed weights that an adapter changes; use expert_slices=1",
        ),
        (quantised, 2, {}, r"q_proj is packed \(a Int8Tensor\); use tp=1"),
        (
            quantised,
            1,
            {"compute_dtype": torch.bfloat16},
            "compute_dtype=torch.bfloat16: .* load the model in that",
        ),
        (
            quantised,
            1,
            {"loss_chunk_vocabulary": 9},
            "loss_chunk_vocabulary=9 needs a head that is its weight alone",
        ),
    ],
    ids=[
        "trained",
        "activations",
        "one scale",
        "adapted",
        "tp",
        "compute dtype",
        "vocabulary",
    ],
)
def test_what_packed_weights_cannot_do_raises(pool, make, tp, options, message):
    is_refused(pool.outcomes(refused, 2, make, options, tp=tp), message)


def is_refused(outcomes: list[Any], message: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, UnsupportedError) and re.search(
            message, str(outcome)
        )


def saved_whole(mesh: DeviceMesh, folder: Path) -> None:
    model = rs.parallelize(quantised(), mesh)
    model.save_pretrained(folder)


def read_in_parts(mesh: DeviceMesh, folder: Path) -> None:
    def adapt(model: nn.Module) -> Any:
        torchao.quantize_(model, BITS["int8"])
        return model

    rs.from_pretrained(folder, mesh, adapt=adapt)


def test_folders_of_packed_weights_are_not_made_in_parts(pool, tmp_path):
    is_refused(
        pool.outcomes(saved_whole, 2, tmp_path / "whole"),
        "LlamaForCausalLM has packed weights, .*; save its a",
    )
    assert not (tmp_path / "whole").exists()
    build("llama").save_pretrained(tmp_path / "base")
    is_refused(pool.outcomes(read_in_parts, 2, tmp_path / "base"), "quantise")
    from_folder(tmp_path / "base").save_pretrained(tmp_path / "packed")
    is_refused(
        pool.outcomes(read_in_parts, 2, tmp_path / "packed"),
        r"quantised \(torchao\), .*; open it with from_pr",
    )
