"""Experts gathered in slices: loss and gradients of one process, bytes of three slices, and files of transformers."""

import re
import tempfile
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import ringspan as rs
from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.state import random_state, restore, run_state
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.expert_slices import num_slices, slice_bounds
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.model.memory.resting import groups_in
from ringspan.torch.model.weights.shards import join_slices
from tests.cases import long
from tests.every_model.hybrids import hybrid_config
from tests.every_model.weights import differences, stored
from tests.torch.model import test_four_bits
from tests.torch.model.memory.test_resting import model_with_zero_experts
from tests.torch.model.test_peft import LIMITS as PACKED_LIMITS
from tests.torch.models import (
    build,
    check,
    close_by_name,
    config,
    relative,
    step,
    tokens,
    whole,
    whole_gradients,
)

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


def mixture(
    kind: str, how: str = "trained", *, wide: bool = True, **changes: Any
) -> Any:
    """A small model, in float64 if ``wide``, whose experts are trained, frozen or adapted."""
    torch.manual_seed(0)
    if kind == "longcat_flash":
        sizes = {"zero_expert_num": 3, "n_routed_experts": EXPERTS, "num_layers": 2}
        made = hybrid_config(kind, **sizes, initializer_range=0.3, **changes)
    else:
        made = config(kind, **_MIXTURE | KINDS[kind] | changes)
        made._experts_implementation = "eager"
        made._attn_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(made)
    model = in_float64_of(model) if wide else model.float()
    model.set_experts_implementation("eager")  # the others know no float64
    for name, parameter in model.named_parameters():
        if "experts" in name and parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        if how == "frozen" and ".experts." in name:
            parameter.requires_grad_(False)
    if how == "LoRA":
        adapter = LoraConfig(r=2, init_lora_weights=False, **ADAPTER)
        return get_peft_model(model, adapter).to(model.dtype)
    return model


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
    return loss, join_slices(gradients)


CASES = [
    ("qwen3_moe", "trained", 2, 2, "attention"),
    ("deepseek_v3", "frozen", 2, 3, "full"),
    ("mixtral", "trained", 1, EXPERTS, "none"),
    ("gpt_oss", "LoRA", 2, EXPERTS, "none"),
]
ALL = product(
    (*KINDS, "longcat_flash"),
    ("trained", "frozen", "LoRA"),
    (1, 2, 3),
    (1, 2, 3, EXPERTS),
    ("none", "attention", "full"),
)


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "slices", "checkpoint"),
    [*CASES, *long(*(case for case in ALL if case not in CASES))],
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
    return loss.detach(), join_slices(whole_gradients(model))


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "sizes", "options"),
    [
        ("qwen3_moe", "trained", 4, {"replicate": 2}, {"feedforward_chunk_tokens": 3}),
        ("deepseek_v3", "trained", 2, {}, {"layout": "contiguous", "folds": 2, "route": "all-gather"}),
        *long(
            ("gpt_oss", "LoRA", 2, {}, {"feedforward_chunk_tokens": 2, "checkpoint": "full"}),
            ("mixtral", "trained", 2, {}, {"offload": "activations", "layers_per_checkpoint": 2}),
            ("glm4_moe", "trained", 3, {}, {"compile": "aot_eager"}),
            ("longcat_flash", "LoRA", 2, {}, {"checkpoint": "none", "expert_slices": 3}),
        ),
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


@pytest.mark.parametrize("checkpoint", ["full", *long("attention", "none")])
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
    return loss, join_slices(gradients)


@pytest.mark.parametrize("how", ["trained", *long("LoRA")])
@pytest.mark.parametrize("num_chosen", [1, 0], ids=["one token", "no token"])
def test_experts_that_nobody_chooses_have_no_gradient(pool, num_chosen, how):
    model = model_with_zero_experts(num_chosen, is_adapted=how == "LoRA")
    expected = [step(model) for _ in range(2)][1]
    check(pool.run(resting, 2, num_chosen, how, 2), expected)


@pytest.mark.parametrize("in_parts", [True, *long(False)])
def test_experts_beside_packed_weights_are_sliced(pool, tmp_path, in_parts):
    bits = "nf4, scales packed"
    build("mixtral", num_local_experts=4).save_pretrained(tmp_path)
    model = test_four_bits.adapted(test_four_bits.opened(tmp_path, bits))
    expected = test_four_bits.trained(step(model))
    given = (tmp_path, bits, in_parts, {"expert_slices": 2})
    check(pool.run(test_four_bits.ring_step, 2, *given), expected, PACKED_LIMITS)


def files_of(model: Any) -> dict[str, Any]:
    """Files that one process writes, by the names of their tensors."""
    plain = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        return stored(Path(folder))


def saved_and_opened(mesh, folder, slices, how, expected):
    """Names of a ring's weights that differ from the files of one process, by the way they were handed over."""
    model = rs.parallelize(mixture("gpt_oss", how, wide=False), mesh, expert_slices=slices)  # fmt: skip
    handed = dict(rs.named_weights(model, everywhere=True))
    limit = 1e-6 if how == "LoRA" else 0
    wrong: dict[str, Any] = {"names": sorted(handed.keys() ^ expected.keys())}
    wrong["handed over"] = [
        name
        for name in handed.keys() & expected.keys()
        if relative(handed[name], expected[name]) > limit
    ]
    if how == "trained":
        model.save_pretrained(folder)
        if mesh.get_rank() == 0:
            wrong["saved"] = differences(stored(Path(folder)), expected)
        dist.barrier(mesh.get_group("ring"))
        again = rs.from_pretrained(folder, mesh, expert_slices=3, dtype=torch.float32)
        handed = dict(rs.named_weights(again, everywhere=True))
        wrong["read"] = differences(handed, expected)
        again.load_state_dict({name: 0 * x for name, x in expected.items()})
        again.load_state_dict(expected)
        handed = dict(rs.named_weights(again, everywhere=True))
        wrong["loaded"] = differences(handed, expected)
    return {what: names for what, names in wrong.items() if names}


@pytest.mark.parametrize(("ranks", "how"), [(2, "trained"), *long((3, "LoRA"))])
def test_files_are_those_of_transformers(pool, tmp_path, ranks, how):
    expected = files_of(mixture("gpt_oss", how, wide=False))
    wrong = pool.run(saved_and_opened, ranks, tmp_path, 2, how, expected)
    assert wrong == [{}] * ranks


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def stepped(mesh, folder, slices, *, resumes):
    """Take two steps and save, or resume and take a third one; return the weights by their names in files."""
    model = rs.parallelize(mixture("deepseek_v3"), mesh, expert_slices=slices)
    optimizer = make_optimizer(model)
    checkpoints = Checkpoints(folder, run_id="a", keep=2, asynchronous=False)
    if resumes:
        found = checkpoints.find()
        assert found.folder is not None
        assert found.manifest is not None
        device = torch.device("cpu")
        restore(checkpoints, found.folder, found.manifest, model, optimizer, device)
    for _ in range(1 if resumes else 2):
        loss_of(model, mesh, {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not resumes:
        state, own = run_state(model, optimizer), random_state(torch.device("cpu"))
        error = checkpoints.save(2, state, own, {}, mesh={"ring": 1}, layout="zigzag")
        assert error is None
    checkpoints.close()
    return join_slices(
        {name: whole(p.detach()) for name, p in model.named_parameters()}
    )


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param((2, 2), (4, 2), id="other rings", marks=pytest.mark.long),
        pytest.param((4, 3), (4, 2), id="other slices"),
        pytest.param((1, 1), (2, EXPERTS), id="from whole", marks=pytest.mark.long),
        pytest.param((2, 2), (1, 1), id="to whole", marks=pytest.mark.long),
    ],
)
def test_training_resumes_with_other_slices_and_rings(pool, tmp_path, saved, resumed):
    model = mixture("deepseek_v3")
    optimizer = make_optimizer(model)
    for _ in range(3):
        alone(model)
        optimizer.step()
        optimizer.zero_grad()
    for resumes, (ring, slices) in enumerate((saved, resumed)):
        run = partial(stepped, resumes=bool(resumes))
        found = pool.run(run, 4, tmp_path, slices, replicate=4 // ring)
    for weights in found:
        close_by_name(weights, dict(model.named_parameters()), 1e-9)


def routed(model, batch):
    loss = model(**batch, output_router_logits=True).loss
    loss.backward()
    return loss.detach(), join_slices(whole_gradients(model))


def routed_on_ring(mesh):
    model = mixture("qwen3_moe", wide=False)
    model = rs.parallelize(model, mesh, expert_slices=2)
    ids = tokens(1, 37)
    return routed(model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))


def test_the_loss_of_routers_is_added(pool):
    ids = tokens(1, 37)
    expected = routed(mixture("qwen3_moe", wide=False), {"input_ids": ids, "labels": ids})  # fmt: skip
    check(pool.run(routed_on_ring, 2), expected)


def generated(mesh, slices):
    model = rs.parallelize(mixture("gpt_oss", wide=False), mesh, expert_slices=slices)
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, mesh, {})
    return loss, model.generate(tokens(1, 37), max_new_tokens=5, do_sample=False)


def test_evaluation_and_generation_are_those_of_whole_layers(pool):
    for found, expected in zip(*(pool.run(generated, 2, n) for n in (3, 1)), strict=True):  # fmt: skip
        assert relative(found[0], expected[0]) < 1e-6
        assert torch.equal(found[1], expected[1])


def computed_in_16_bits(mesh, slices, implementation):
    model = mixture("qwen3_moe", wide=False)
    model.set_experts_implementation(implementation)
    model = rs.parallelize(
        model, mesh, expert_slices=slices, compute_dtype=torch.bfloat16
    )
    loss, gradients = step(model, mesh)
    return loss, join_slices(gradients)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_layers_compute_in_16_bits(pool, implementation):
    [expected, _] = pool.run(computed_in_16_bits, 2, 1, implementation)
    found = pool.run(computed_in_16_bits, 2, 2, implementation)
    check(found, expected, (1e-2, 3e-2))


def refused(mesh, make, options):
    rs.parallelize(make(), mesh, **options)


def with_own_forward() -> Any:
    model = mixture("mixtral", wide=False)
    experts = model.model.layers[1].mlp.experts
    experts.forward = type(experts).forward.__get__(experts)
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (partial(build, "llama"), {"expert_slices": 2}, UnsupportedError,
         "expert_slices=2: LlamaForCausalLM has no layer whose experts are stacked in tensors.*use expert_slices=1"),
        (partial(build, "llama4_text"), {"expert_slices": 2}, UnsupportedError, "use expert_slices=1"),
        (partial(mixture, "mixtral", wide=False), {"expert_slices": 6}, ConfigError,
         "expert_slices=6: layers have 5 experts; use 5 slices at most"),
        (partial(mixture, "mixtral", wide=False), {"expert_slices": 0}, ConfigError,
         'expert_slices must be at least 1, got 0; or use "auto"'),
        (partial(mixture, "mixtral", wide=False), {"expert_slices": "some"}, ConfigError,
         'expert_slices must be an integer, got .*; or use "auto"'),
        (with_own_forward, {"expert_slices": 2}, UnsupportedError,
         "layers.1.mlp.experts has a forward of its own; use expert_slices=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_sliced_is_named(pool, make, options, error, message):
    outcomes = pool.outcomes(refused, 2, make, options)
    for outcome in outcomes:
        assert isinstance(outcome, error)
        assert re.search(message, str(outcome))


def test_auto_takes_the_fewest_slices_within_its_bound():
    layer = 256 * 3 * 7168 * 2048 * 2  # DeepSeek-V3
    assert [num_slices("auto", 256, layer // part) for part in (1, 10, 11)] == [11, 2, 1]  # fmt: skip
    assert num_slices("auto", 4, 100 * layer) == 4


@given(st.integers(1, 300), st.data())
def test_each_expert_is_in_one_slice(experts, data):
    slices = data.draw(st.integers(1, experts))
    bounds = slice_bounds(experts, slices)
    found = [number for first, last in bounds for number in range(first, last)]
    assert found == [*range(experts)]
    sizes = [last - first for first, last in bounds]
    assert len(sizes) == slices
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-experts // slices)
