"""A model whose ranks compute their part in folds is itself in one pass: loss, gradients, log-probabilities."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.geometry.folds import fold_layouts, folded_layout
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.engine.attention.request import Request
from ringspan.torch.mechanisms.folds.attention import Fold, Folds, attend_in_folds
from tests.cases import long, pairwise
from tests.core.strategies import masks
from tests.torch.models import build, relative, tokens, whole_gradients

KINDS: list[tuple[str, dict[str, Any]]] = [
    *long(("llama-tied", {"checkpoint": "full"})),
    ("mistral-window", {"checkpoint": "none", "route": "all-gather"}),
    *long(
        ("gemma3_text", {"layers_per_checkpoint": 2, "offload": "activations"}),
        ("gemma2", {"route": "pass-q"}),
        ("gpt_oss", {"checkpoint": "full", "offload": "activations"}),
        ("llama4_text", {}),
    ),
    ("deepseek_v3", {"loss_chunk_tokens": 5}),
    *long(("gpt2", {}), ("lora", {"layout": "contiguous"})),
]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind != "lora":
        model = in_float64_of(build(kind))
        model.set_experts_implementation("eager")  # the others know no float64
        return model
    model = get_peft_model(
        in_float64_of(build("llama")),
        LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM"),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().eval()


def steps(
    mesh: DeviceMesh,
    kind: str,
    folds: int,
    documents: list[int],
    options: dict[str, Any],
) -> Any:
    """Two batches, accumulated; then the log-probabilities of the second."""
    length, layout = sum(documents), options.get("layout", "zigzag")
    model = rs.parallelize(model_of(kind), mesh, folds=folds, **options)
    positions = torch.cat([torch.arange(each) for each in documents])[None]
    losses, batch = [], {}
    for seed in (1, 2):
        ids = tokens(2, length, seed)
        whole = {"input_ids": ids, "labels": ids} | (
            {"position_ids": positions} if len(documents) > 1 else {}
        )
        batch = rs.shard_batch(whole, mesh, layout=layout, folds=folds)
        losses.append(model(**batch, num_items_in_batch=4 * length).loss)
        losses[-1].backward()
    with torch.no_grad():
        assert float(model(**batch, num_items_in_batch=4 * length).loss) == float(
            losses[-1]
        )
    scores = rs.token_logprobs(model, batch)
    found = (
        torch.stack([*losses]).detach(),
        scores.detach(),
        deepcopy(whole_gradients(model)),
    )
    scores.sum().backward()
    return *found, whole_gradients(model)


def is_same(
    pool: Any,
    kind: str,
    options: dict[str, Any],
    ranks: int,
    folds: int,
    documents: list[int],
) -> None:
    [once] = pool.run(steps, 1, kind, 1, documents, options)
    for rank in pool.run(steps, ranks, kind, folds, documents, options):
        for found, wanted in zip(rank[:2], once[:2], strict=True):
            assert relative(found, wanted) < 1e-12
        for found, wanted in zip(rank[2:], once[2:], strict=True):
            for name, gradient in wanted.items():
                assert gradient is None or relative(found[name], gradient) < 1e-9, name


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_each_mechanism_in_folds_is_itself_in_one_pass(pool, kind, options):
    is_same(pool, kind, options, 2, 2, [23, 18])


def changed_between(mesh: DeviceMesh, how: str) -> None:
    model: Any = rs.parallelize(model_of("llama"), mesh, folds=2)
    batch = rs.shard_batch(
        {"input_ids": tokens(1, 9), "labels": tokens(1, 9)}, mesh, folds=2
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(**batch).loss.backward()
    loss = model(**batch).loss
    with torch.no_grad():
        optimizer.step() if how == "step" else next(model.parameters()).to_local().mul_(
            2
        )
    loss.backward()


@pytest.mark.parametrize("how", ["step", "shard"])
def test_weights_changed_before_backward_are_refused(pool, how):
    for outcome in pool.outcomes(changed_between, 2, how):
        assert isinstance(
            outcome, rs.UnsupportedError
        ) and "was changed between a forward pass and" in str(outcome)


def attended(
    mesh: DeviceMesh | None,
    mask: rs.Mask,
    layout: Any,
    length: int,
    folds: int,
    offload: Any,
) -> Any:
    """This rank's results of attention in folds, and its gradients."""
    ring = None if mesh is None else mesh["ring"].get_group()
    ranks, rank = (
        (1, 0) if mesh is None else (mesh["ring"].size(), mesh["ring"].get_local_rank())
    )
    whole = folded_layout(layout, length, ranks, folds)
    kept = Folds(
        fold_layouts(layout, length, ranks, folds),
        offload,
        keeps_results=bool(length % 2),
    )
    local = [rs.shard(x, whole, rank, 2).chunk(folds, 2) for x in inputs(length)]
    sinks = SINKS.clone().requires_grad_()
    found: list[tuple[Tensor, ...]] = []
    for turn, number in enumerate([*range(folds), *reversed(range(folds))]):
        q, k, v = (
            part[number].clone().requires_grad_(turn >= folds) for part in local[:3]
        )
        with torch.set_grad_enabled(turn >= folds):
            asked = Request(q, k, v, mask=mask, group=ring, sinks=sinks)
            out = attend_in_folds(Fold(kept, number, turn >= folds), "one", asked)
        if turn >= folds:
            out.backward(local[3][number])
            found.append((out.detach(), q.grad, k.grad, v.grad))  # pyright: ignore
    assert not any(
        waiting._folds["one"] for waiting in (kept.keys, kept.gradients, kept.results)
    )
    return [
        torch.cat(column, 2) for column in zip(*reversed(found), strict=True)
    ], sinks.grad


SINKS = torch.linspace(-1, 1, 4, dtype=torch.float64)


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, heads, length, 8, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2, 4)
    ]


def check_attended(
    found: list[Any], mask: rs.Mask, layout: Any, length: int, folds: int
) -> None:
    """Compare what all ranks have with attention by a dense mask."""
    (q, k, v, dout), sinks = inputs(length), SINKS.clone()
    for x in (q, k, v, sinks):
        x.requires_grad_()
    seen = torch.from_numpy(mask.dense(np.arange(length), np.arange(length)))
    scores = ((q @ k.repeat_interleave(2, 1).mT) * 8**-0.5).masked_fill(
        ~seen, -torch.inf
    )
    scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, length, 1)], -1)
    out = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    out.backward(dout)
    order = torch.from_numpy(
        folded_layout(layout, length, len(found), folds).inverse[:length]
    )
    for number, expected in enumerate((out, q.grad, k.grad, v.grad)):
        whole = torch.cat([rank[0][number] for rank in found], 2)[:, :, order]
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        sum(rank[1] for rank in found), sinks.grad, rtol=0, atol=1e-11
    )


OFFLOADS = "none", "activations"


@given(masks, st.integers(1, 33), st.integers(1, 5), st.sampled_from(OFFLOADS))
def test_any_mask_in_any_folds_is_that_of_the_whole(mask, length, folds, offload):
    mask &= rs.causal()
    check_attended(
        [attended(None, mask, "zigzag", length, folds, offload)],
        mask,
        "zigzag",
        length,
        folds,
    )


MASKS = (
    rs.causal(),
    rs.sliding_window(4),
    rs.documents([3, 9, 1, 20]),
    rs.documents([15, 18], window=7),
)
ROWS = pairwise(MASKS, ("zigzag", "contiguous"), (33, 1, 18), (5, 2, 3, 4), OFFLOADS)


def all_attended(mesh: DeviceMesh) -> list[Any]:
    return [attended(mesh, *row) for row in ROWS]


@pytest.mark.parametrize("ranks", [2, *long(3)])
def test_rings_in_folds_compute_what_one_rank_does(pool, ranks):
    for row, *found in zip(ROWS, *pool.run(all_attended, ranks), strict=True):
        check_attended(found, *row[:-1])
