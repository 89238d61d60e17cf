"""Models whose heads are split over ``tp`` and whose sequence is split over the ring, against one process."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ringspan as rs
from ringspan.torch.model.tensor_parallel.split import refuse_split
from ringspan.train.run_folder.export import save_model
from tests.cases import few, long
from tests.torch.data.test_cross_entropy import CHUNKS, EXTRAS, example, whole
from tests.torch.models import build, logged, relative, tokens
from tests.torch.test_parallelize import check_steps, one_step, ring_step

# 49 and 45 rows a rank: uneven over the ring
EVEN = {
    "vocab_size": 98,
    "intermediate_size": 90,
}
BIASED = EVEN | {"attention_bias": True, "mlp_bias": True}

SEGMENTS = {"checkpoint": "full", "layers_per_checkpoint": 2}
CASES = [
    # kind, ranks, tp, replicate, layout, length, batch, accumulate, options
    *long(("llama", 4, 2, 1, "zigzag", 37, 2, 1, {"changes": EVEN})),
    (
        "llama",
        4,
        2,
        1,
        "striped",
        23,
        1,
        2,
        {"changes": BIASED, "labels": "few"} | SEGMENTS,
    ),
    # a vocabulary of 97: every rank has the whole head
    (
        "qwen3",
        4,
        2,
        1,
        "zigzag",
        37,
        1,
        1,
        {},
    ),
    *long(
        (
            "llama-tied",
            4,
            2,
            1,
            "zigzag",
            31,
            1,
            1,
            {"changes": EVEN | {"pad_token_id": 60}, "loss_chunk_vocabulary": 20},
        ),
        (
            "llama",
            4,
            2,
            1,
            "zigzag",
            37,
            1,
            1,
            {"changes": EVEN, "route": "ulysses", "documents": [[5, 20, 1, 11]]},
        ),
    ),
    (
        "llama",
        4,
        2,
        2,
        "zigzag",
        37,
        1,
        2,
        {"changes": EVEN, "feedforward_chunk_tokens": 7},
    ),
    *long(
        (
            "llama",
            4,
            4,
            1,
            "zigzag",
            37,
            1,
            1,
            {"changes": {"vocab_size": 96, "num_key_value_heads": 4}},
        ),
        ("gemma3_text", 4, 2, 1, "zigzag", 45, 1, 1, {"changes": EVEN}),
        (
            "qwen3",
            4,
            2,
            1,
            "contiguous",
            37,
            1,
            2,
            {"changes": EVEN, "checkpoint": "none", "loss_chunk_tokens": 5},
        ),
        (
            "llama",
            2,
            2,
            1,
            "zigzag",
            37,
            2,
            1,
            {"changes": EVEN, "offload": "activations"},
        ),
        ("mistral-window", 4, 2, 1, "zigzag", 45, 1, 1, {"changes": EVEN}),
    ),
]


@pytest.mark.parametrize(
    (
        "kind",
        "ranks",
        "tp",
        "replicate",
        "layout",
        "length",
        "batch",
        "accumulate",
        "options",
    ),
    CASES,
)
def test_a_split_model_on_the_ring_equals_itself_on_one_process(
    pool, kind, ranks, tp, replicate, layout, length, batch, accumulate, options
):
    truth = (
        options.get("labels", "all"),
        options.get("documents"),
        options.get("changes", {}),
    )
    expected = one_step(kind, length, batch * replicate * accumulate, *truth)
    case = kind, layout, length, batch, accumulate, options
    check_steps(pool.run(ring_step, ranks, *case, replicate=replicate, tp=tp), expected)


def clipped_norm(mesh: DeviceMesh, limit: float) -> Any:
    model = rs.parallelize(build("qwen3", **EVEN), mesh)
    ids = tokens(2, 37)
    model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), limit)
    held = {
        name: p.to_local().numel()
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return norm.full_tensor(), gradients, held


def test_the_norm_counts_each_parameter_once(pool):
    model = build("qwen3", **EVEN)
    ids = tokens(2, 37)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert expected > 0.2
    results = pool.run(clipped_norm, 4, 0.1, tp=2)
    for norm, gradients, _ in results:
        assert relative(norm, expected) < 1e-6
        for name, parameter in model.named_parameters():
            assert relative(gradients[name], parameter.grad) < 1e-5, name
    for name, parameter in model.named_parameters():
        copies = 1 if "proj" in name or "lm_head" in name or "embed" in name else 2
        assert sum(held[name] for *_, held in results) == copies * parameter.numel(), (
            name
        )


REDISTRIBUTION = "torch.distributed.tensor._redistribute"  # where DTensor warns


def warnings_of_clipping(mesh: DeviceMesh) -> list[str]:
    with logged(REDISTRIBUTION) as lines:
        for _ in range(2):  # models on one mesh
            clipped_norm(mesh, 0.1)
    # and none of the gathering for this test
    return [line for line in lines if "all_reduce" in line]


def warnings_of_saving(mesh: DeviceMesh, folder: Path) -> list[str]:
    with logged(REDISTRIBUTION) as lines:
        save_model(
            rs.parallelize(build("qwen3", **EVEN), mesh), Mock(), folder, torch.float32
        )
    return lines


def test_a_split_model_saves_quietly_and_has_one_norm(pool, tmp_path):
    assert pool.run(warnings_of_saving, 4, tmp_path / "model", tp=2) == [[]] * 4
    assert pool.run(warnings_of_clipping, 4, tp=2) == [[]] * 4


def shared_loss(
    mesh: DeviceMesh,
    chunk_tokens: int,
    chunk_vocabulary: int | None,
    extras: Any,
    dtype: Any,
) -> Any:
    group, rank = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    inputs, targets = example(dtype, vocabulary=100)
    hidden, *others = (x.detach() for x in inputs)
    weight, bias = (
        x.chunk(mesh["tp"].size())[rank].clone().requires_grad_() for x in others
    )
    chunks = {"chunk_tokens": chunk_tokens, "chunk_vocabulary": chunk_vocabulary}
    hidden.requires_grad_()
    loss = rs.blockwise_cross_entropy(
        hidden, weight, targets, bias=bias, group=group, **chunks, **extras
    )
    losses = rs.blockwise_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        group=group,
        reduction="none",
        **chunks,
        **extras,
    )
    each = (loss + (losses * torch.linspace(-1, 2, len(losses))).sum()) * 0.3
    d_hidden, *others = torch.autograd.grad(each, [hidden, weight, bias])
    dist.all_reduce(d_hidden, group=group)
    gathered = []
    for x in others:
        parts = [torch.empty_like(x) for _ in range(mesh["tp"].size())]
        dist.all_gather(parts, x, group=group)
        gathered.append(torch.cat(parts))
    return loss.detach(), [d_hidden, *gathered], losses.detach()


@pytest.mark.parametrize(("chunks", "extras"), few(zip(CHUNKS, EXTRAS, strict=True), 2))
def test_ranks_that_share_the_vocabulary_get_the_whole_loss(pool, chunks, extras):
    chunk_tokens, chunk_vocabulary = chunks
    inputs, targets = example(torch.float64, vocabulary=100)
    truth = whole(*inputs, targets, **extras)
    hidden, *others = inputs
    tokens = torch.stack(
        [
            whole(hidden[i : i + 1], *others, targets[i : i + 1], **extras)
            for i in range(len(targets))
        ]
    )
    wanted = torch.autograd.grad(
        (truth + (tokens * torch.linspace(-1, 2, len(tokens))).sum()) * 0.3, inputs
    )
    for loss, gradients, losses in pool.run(
        shared_loss, 4, chunk_tokens, chunk_vocabulary, extras, torch.float64, tp=4
    ):
        assert relative(loss, truth) < 1e-13 and relative(losses, tokens) < 1e-13
        for gradient, expected in zip(gradients, wanted, strict=True):
            assert relative(gradient, expected) < 1e-13


def summed(mesh: DeviceMesh) -> int:
    """How often a layer's backward pass sums over ``tp``; what FSDP does goes over the ring."""
    model = rs.parallelize(
        build("qwen3", **EVEN, num_hidden_layers=1), mesh, checkpoint="none"
    )
    ids, calls, reduce = tokens(1, 8), [], dist.all_reduce
    loss = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    dist.all_reduce = lambda tensor, *a, **k: (
        calls.append(tuple(tensor.shape)) or reduce(tensor, *a, **k)
    )
    try:
        loss.backward()
    finally:
        dist.all_reduce = reduce
    return len(calls)


def test_projections_of_one_input_sum_its_gradient_once(pool):
    # the head's, the feed-forward's and attention's inputs, and the norms of queries and of keys
    assert pool.run(summed, 2, tp=2) == [5, 5]


@pytest.mark.parametrize(
    ("kind", "tp", "changes", "message"),
    [
        ("llama", 3, {}, "tp=3 does not divide num_attention_heads=4"),
        ("llama", 4, {}, "tp=4 does not divide num_key_value_heads=2"),
        (
            "llama",
            2,
            {"intermediate_size": 95},
            "tp=2 does not divide the 95 features of model.layers.0.mlp.gate_proj",
        ),
        (
            "gpt_oss",
            2,
            {},
            "no tensor-parallel plan for the layers of GptOssForCausalLM",
        ),
        ("deepseek_v3", 2, {"num_key_value_heads": 4}, "asks for 'moe_tp_experts'"),
        ("llama4_text", 2, {}, "asks for 'moe_tp_experts'"),
        (
            "gemma3n_text",
            2,
            {},
            "its AltUp reads the weights of a projection itself",
        ),
        (
            "phi3",
            2,
            {"pad_token_id": 0},
            "asks for 'rowwise_split_input' .model.layers.0.self_attn.o_proj",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(kind, tp, changes, message):
    model = build(kind, **changes)
    with pytest.raises(rs.UnsupportedError, match=message):
        refuse_split(model, tp)


def test_plans_with_gaps_and_dropout_are_refused():
    for style in ("sequence_parallel", "colwise_gather_output"):
        model = build("llama")
        model.tp_plan = {**model.tp_plan, "model.layers.*.self_attn.o_proj": style}
        with pytest.raises(
            rs.UnsupportedError,
            match=rf"'{style}' \(model\.layers\.0\.self_attn\.o_proj\)",
        ):
            refuse_split(model, 2)
    model = build("llama")
    model.model.layers[1].self_attn.register_parameter(
        "sinks", nn.Parameter(torch.zeros(4))
    )
    with pytest.raises(
        rs.UnsupportedError,
        match=r"model\.layers\.1\.self_attn but says nothing of its sinks",
    ):
        refuse_split(model, 2)
    model = build("llama")
    model.model.layers[1].mlp.dropout = nn.Dropout(0.1)
    with pytest.raises(rs.UnsupportedError, match=r"dropout 0\.1"):
        refuse_split(model, 2)
