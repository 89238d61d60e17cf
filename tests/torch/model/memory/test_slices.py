"""Experts gathered in slices: loss and gradients of one process, three slices' bytes in memory, and files of transformers."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import ringspan as rs
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.model.memory.resting import groups_in
from ringspan.torch.model.weights.shards import whole_name
from tests.every_model.hybrids import hybrid_config
from tests.torch.model.memory.test_resting import model_with_zero_experts
from tests.torch.models import check, config, step, tokens, whole_gradients

LIMITS = (1e-9, 1e-9)
EXPERTS = 5
_MIXTURE = {
    "hidden_size": 48,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "head_dim": 12},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 12, "intermediate_size": 24},
    "deepseek_v3": {"n_routed_experts": EXPERTS, "n_shared_experts": 1},
    "glm4_moe": {
        "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 12,
    },
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 24, "head_dim": 12},
}  # fmt: skip
ADAPTER = {
    "target_modules": ["o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def mixture(kind: str, how: str = "trained", **changes: Any) -> Any:
    """A small model in float64, whose experts are trained, frozen or adapted."""
    torch.manual_seed(0)
    if kind == "longcat_flash":
        sizes = {"zero_expert_num": 3, "n_routed_experts": EXPERTS, "num_layers": 2}
        made = hybrid_config(kind, **sizes, initializer_range=0.3, **changes)
    else:
        made = config(kind, **_MIXTURE | KINDS[kind] | changes)
        made._experts_implementation = "eager"
        made._attn_implementation = "eager"
    model = in_float64_of(AutoModelForCausalLM.from_config(made))
    model.set_experts_implementation("eager")  # the others know no float64
    for name, parameter in model.named_parameters():
        if "experts" in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        if how == "frozen" and ".experts." in name:
            parameter.requires_grad_(False)
    if how == "LoRA":
        adapter = LoraConfig(r=2, init_lora_weights=False, **ADAPTER)
        return get_peft_model(model, adapter).double()
    return model


def joined(gradients: dict[str, Any]) -> dict[str, Any]:
    """Put the slices' gradients together under the names of one process."""
    parts: dict[str, list[Any]] = {}
    for name, gradient in gradients.items():
        parts.setdefault(whole_name(name), []).append(gradient)
    return {
        name: each[0] if len(each) == 1 or each[0] is None else torch.cat(each)
        for name, each in parts.items()
    }


def alone(model: Any) -> tuple[Any, dict[str, Any]]:
    """The step of one process, whose loss is computed in float64 too."""
    ids = tokens(1, 37)
    logits = model(input_ids=ids).logits
    loss = cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def trained(mesh, kind, how, options):
    model = rs.parallelize(mixture(kind, how), mesh, **options)
    loss, gradients = step(model, mesh)
    return loss, joined(gradients)


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "slices", "checkpoint"),
    [
        ("qwen3_moe", "trained", 2, 2, "attention"),
        ("gpt_oss", "trained", 3, 3, "full"),
        ("deepseek_v3", "frozen", 2, 3, "full"),
        ("glm4_moe", "LoRA", 2, 2, "full"),
        ("mixtral", "trained", 1, EXPERTS, "none"),
        ("longcat_flash", "trained", 2, 2, "attention"),
        ("gpt_oss", "LoRA", 2, EXPERTS, "none"),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    pool, kind, how, ranks, slices, checkpoint
):
    options = {"expert_slices": slices, "checkpoint": checkpoint}
    expected = alone(mixture(kind, how))
    check(pool.run(trained, ranks, kind, how, options), expected, LIMITS)


def loss_of(model: Any, mesh: Any, options: dict[str, Any], **others: Any) -> Any:
    ids = tokens(1, 37)
    batch = {"input_ids": ids, "labels": ids}
    sizes = {"layout": options.get("layout", "zigzag"), "folds": options.get("folds", 1)}  # fmt: skip
    return model(**rs.shard_batch(batch, mesh, **sizes), **others).loss


def trained_twice(mesh, kind, how, options):
    """The gradients of two passes, of which the first one's wait to be summed."""
    model = rs.parallelize(mixture(kind, how), mesh, **options)
    inner = model.get_base_model() if how == "LoRA" else model
    inner.set_requires_gradient_sync(False)
    loss_of(model, mesh, options).backward()
    inner.set_requires_gradient_sync(True)
    loss = loss_of(model, mesh, options)
    loss.backward()
    return loss.detach(), joined(whole_gradients(model))


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "sizes", "options"),
    [
        ("qwen3_moe", "trained", 4, {"replicate": 2}, {"feedforward_chunk_tokens": 3}),
        ("gpt_oss", "LoRA", 2, {}, {"feedforward_chunk_tokens": 2, "checkpoint": "full"}),
        ("deepseek_v3", "trained", 2, {}, {"layout": "contiguous", "folds": 2, "route": "all-gather"}),
        ("mixtral", "trained", 2, {}, {"offload": "activations", "layers_per_checkpoint": 2}),
        ("glm4_moe", "trained", 3, {}, {"compile": "aot_eager"}),
        ("longcat_flash", "LoRA", 2, {}, {"checkpoint": "none", "expert_slices": 3}),
    ],
)  # fmt: skip
def test_slices_go_with_other_options_and_add_gradients(
    pool, kind, how, ranks, sizes, options
):
    model = mixture(kind, how)
    alone(model)
    expected = alone(model)
    options = {"expert_slices": 2} | options
    found = pool.run(trained_twice, ranks, kind, how, options, **sizes)
    check(found, expected, LIMITS)


def gathered(mesh, slices, checkpoint):
    """The bytes of experts that a rank gathers and sums in a step, and the most that it holds at once."""
    sizes = {"num_experts": 100, "moe_intermediate_size": 8, "num_experts_per_tok": 4}
    model = rs.parallelize(
        mixture("qwen3_moe", **sizes),
        mesh,
        expert_slices=slices,
        checkpoint=checkpoint,
    )
    kind = type(groups_in(model)[0])
    start, end, total = kind.unshard, kind._to_sharded, kind.post_backward
    held, seen = Counter[Any](), Counter[str]()

    def bytes_of(group: Any) -> int:
        return sum(
            p.sharded_param.numel() * p.orig_dtype.itemsize
            for p in group.fsdp_params
            if p._module_info.param_name in ("gate_up_proj", "down_proj")
        )

    def note(more: int = 0) -> None:
        seen["most"] = max(seen["most"], sum(held.values()) + more)

    def unshard(group: Any, *args: Any) -> None:
        before = group._all_gather_result
        start(group, *args)
        if before is None and group._all_gather_result is not None:
            held[group] = bytes_of(group)
            seen["gathered"] += held[group]
            note()

    def to_sharded(group: Any) -> None:
        end(group)
        held.pop(group, None)

    def post_backward(group: Any, *args: Any) -> None:
        has = any(
            hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None
            for p in group.fsdp_params
        )
        gradients = bytes_of(group) if has else 0
        seen["summed"] += gradients
        note(gradients)
        total(group, *args)

    with (
        patch.object(kind, "unshard", unshard),
        patch.object(kind, "_to_sharded", to_sharded),
        patch.object(kind, "post_backward", post_backward),
    ):
        for _ in range(2):
            seen.clear()
            step(model, mesh)
    whole = bytes_of_experts(model)
    return {name: number / whole for name, number in seen.items()}


def bytes_of_experts(model: Any) -> int:
    layer = model.model.layers[0]
    named = layer.named_parameters()
    return sum(p.numel() * p.dtype.itemsize for name, p in named if ".experts." in name)


@pytest.mark.parametrize("checkpoint", ["full", "attention", "none"])
def test_three_slices_are_in_memory_and_no_more_bytes_are_sent(pool, checkpoint):
    [whole, *_] = pool.run(gathered, 2, 1, checkpoint)
    [found, *_] = pool.run(gathered, 2, 3, checkpoint)
    assert whole["gathered"] == found["gathered"] == 4  # twice in each of two layers
    assert whole["summed"] == found["summed"] == 2
    assert whole["most"] == 3
    assert found["most"] == pytest.approx(3 / 3, rel=0.02)


def resting(mesh, num_chosen, how, slices):
    model = model_with_zero_experts(num_chosen, is_adapted=how == "LoRA")
    model = rs.parallelize(model, mesh, expert_slices=slices, checkpoint="full")
    inner = model.get_base_model() if how == "LoRA" else model
    inner.set_requires_gradient_sync(False)
    step(model, mesh)
    inner.set_requires_gradient_sync(True)
    loss, gradients = step(model, mesh)
    return loss, joined(gradients)


@pytest.mark.parametrize("how", ["trained", "LoRA"])
@pytest.mark.parametrize("num_chosen", [1, 0], ids=["one token", "no token"])
def test_experts_that_nobody_chooses_are_trained_as_on_one_process(
    pool, num_chosen, how
):
    model = model_with_zero_experts(num_chosen, is_adapted=how == "LoRA")
    expected = [step(model) for _ in range(2)][1]
    check(pool.run(resting, 2, num_chosen, how, 2), expected)
