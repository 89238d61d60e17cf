"""Trees of segments on a ring against their branches as separate rows on one process, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import ringspan as rs
from ringspan.core.geometry.tree import Tree
from ringspan.core.names import BATCH_LAYOUT_NAMES, PREFIX_LOSS_NAMES
from ringspan.proof.float64 import in_float64_of
from tests.cases import long
from tests.core.geometry.test_tree import trees
from tests.every_model.hybrids import HYBRIDS
from tests.every_model.tiny import tiny_model
from tests.fuzz import examples
from tests.torch.data.test_batch import parts
from tests.torch.engine.recurrence.models import build as build_hybrid
from tests.torch.models import build, relative, tokens, whole_gradients

FAMILY = Tree((9, 5, 4, 1, 3, 7, 6), (-1, 0, 1, 1, 0, -1, 5))


def made(kind: str, changes: dict[str, Any]) -> Any:
    if "output_router_logits" in changes:  # float32, as routers' losses are
        return build(kind, **changes)
    model = (
        build_hybrid(kind, torch.float64, **changes)
        if kind in HYBRIDS
        else in_float64_of(build(kind, **changes))
    )
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def whole_batch(tree: Tree, padding: int = 0) -> dict[str, Tensor]:
    ids = tokens(1, sum(tree.lengths) + padding)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    labels[:, sum(tree.lengths) :] = -100
    lengths, parents = (torch.tensor(numbers) for numbers in tree)
    return {
        "input_ids": ids,
        "labels": labels,
        "segment_lengths": lengths,
        "segment_parents": parents,
    }


def branches(tree: Tree) -> list[tuple[Tensor, list[int]]]:
    """The places of each leaf's branch, and the segment of each."""
    found, starts = [], np.cumsum([0, *tree.lengths])
    for leaf in set(range(len(tree.parents))) - set(tree.parents):
        chain = [leaf]
        while tree.parents[chain[0]] >= 0:
            chain.insert(0, tree.parents[chain[0]])
        of_each = [number for number in chain for _ in range(tree.lengths[number])]
        found.append(
            (
                torch.cat(
                    [torch.arange(starts[each], starts[each + 1]) for each in chain]
                ),
                of_each,
            )
        )
    return found


def one_process(
    kind: str, changes: dict[str, Any], tree: Tree, padding: int, prefix_loss: str
) -> Any:
    model, batch, rows = made(kind, changes), whole_batch(tree, padding), branches(tree)
    is_routed = changes.get("output_router_logits", False)
    logprobs = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    total: Any = torch.zeros(())
    count: Any = 0
    routers: list[Any] = []
    for places, of_each in rows:
        out = model(input_ids=batch["input_ids"][:, places])
        targets = batch["labels"][0, places][1:]
        each = out.logits[0, :-1].log_softmax(-1).gather(
            1, targets.clamp_min(0)[:, None]
        )[:, 0] * (targets != -100)
        weight = torch.ones(len(each), dtype=torch.float64)
        for place, number in enumerate(of_each[1:]):
            if prefix_loss == "once":
                weight[place] = 1 / sum(number in other for _, other in rows)
            elif prefix_loss == "none":
                weight[place] = float(number not in tree.parents)
        logprobs[0, places[1:]] = (each * (weight > 0)).detach().double()
        total, count = (
            total - (each * weight).sum(),
            count + ((targets != -100) * weight).sum(),
        )
        routers.append(out.router_logits if is_routed else ())
    loss = total / max(count, 1)
    if is_routed:
        scores: Any = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
        options = model.num_experts, model.num_experts_per_tok
        loss = loss + model.router_aux_loss_coef * load_balancing_loss_func(
            scores, *options
        )
    if count:
        loss.backward()
    return (
        loss.detach(),
        logprobs,
        {name: p.grad for name, p in model.named_parameters()},
    )


def on_ring(
    mesh: DeviceMesh,
    kind: str,
    changes: Any,
    tree: Tree,
    padding: int,
    prefix_loss: Any,
    layout: Any,
    options: Any,
) -> Any:
    model = rs.parallelize(made(kind, changes), mesh, layout=layout, **options)
    local = rs.shard_batch(
        whole_batch(tree, padding), mesh, layout=layout, prefix_loss=prefix_loss
    )
    logprobs = rs.token_logprobs(model, local)
    loss = model(**local).loss
    loss.backward()
    return loss.detach(), logprobs.detach(), whole_gradients(model)


def check(
    pool: Any,
    ranks: int,
    kind: str,
    changes: Any,
    *asked: Any,
    limit: float = 1e-9,
    tp: int = 1,
) -> None:
    loss, logprobs, gradients = one_process(kind, changes, *asked[:3])
    for found in pool.run(on_ring, ranks, kind, changes, *asked, tp=tp):
        assert (
            abs(found[0] - loss) < limit * max(1, abs(loss))
            and (found[1] - logprobs).abs().max() < 100 * limit
        )
        for name, gradient in gradients.items():
            if gradient is not None:
                assert (
                    float((found[2][name] - gradient).norm()) < 1e-15
                    or relative(found[2][name], gradient) < limit
                )


@given(
    given_tree=trees(),
    ranks=st.integers(1, 4),
    padding=st.integers(0, 3),
    prefix_loss=st.sampled_from(PREFIX_LOSS_NAMES),
    layout=st.sampled_from(BATCH_LAYOUT_NAMES),
    route=st.sampled_from(["ring", "bidirectional", "all-gather", "pass-q"]),
)
@examples(6, deadline=None)
def test_any_tree_is_its_branches_as_separate_rows(
    pool, given_tree, ranks, padding, prefix_loss, layout, route
):
    tree, options = Tree(*map(tuple, given_tree)), {"route": route}
    check(
        pool,
        ranks,
        "mistral-window",
        {"sliding_window": 4},
        tree,
        padding,
        prefix_loss,
        layout,
        options,
    )


@pytest.mark.parametrize(
    ("kind", "tp", "changes", "options"),
    [
        ("gpt2", 1, {}, {"checkpoint": "full"}),
        *long(
            ("gemma2", 1, {}, {"route": "ulysses:2"}),
            ("llama4_text", 1, {}, {}),
            ("gpt_oss", 1, {}, {}),
            ("mixtral", 1, {"num_local_experts": 4, "output_router_logits": True}, {}),
        ),
        ("deepseek_v3", 1, {}, {"layers_per_checkpoint": 2}),
        *long(("llama", 2, {"vocab_size": 98}, {"loss_chunk_vocabulary": 13})),
        ("qwen3_next", 1, {}, {}),
        *long(
            ("falcon_h1", 1, {}, {"checkpoint": "full", "layout": "balanced"}),
            ("jamba", 1, {}, {"checkpoint": "none", "layout": "contiguous"}),
            ("minimax", 1, {}, {"layers_per_checkpoint": 2}),
        ),
    ],
)
def test_each_kind_of_layer_takes_trees(pool, kind, tp, changes, options):
    # Temperatures are computed in float32.
    limit = 1e-6 if kind in ("llama4_text", "mixtral") else 1e-9
    options, layout = dict(options), options.get("layout", "zigzag")
    options.pop("layout", None)
    check(
        pool,
        2 * tp,
        kind,
        changes,
        FAMILY,
        2,
        "each",
        layout,
        options,
        limit=limit,
        tp=tp,
    )


@given(
    st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8
    ),
    st.integers(1, 4),
)
def test_shared_prefixes_are_stored_once(rows, least):
    batch, places = rs.share_prefixes(rows, rows, min_shared_tokens=least)
    tree = Tree(
        *(
            tuple(batch[name].tolist())
            for name in ("segment_lengths", "segment_parents")
        )
    )
    assert sorted(row.tolist() for row in places) == sorted(
        row.tolist() for row, _ in branches(tree)
    )
    for own, row in zip(places, rows, strict=True):
        assert (
            batch["input_ids"][0, own].tolist()
            == batch["labels"][0, own].tolist()
            == row
        )
    assert all(tree.lengths[parent] >= least for parent in tree.parents if parent >= 0)
    longest = max(
        [
            0,
            *(
                shared(one, other)
                for place, one in enumerate(rows)
                for other in rows[:place]
            ),
        ]
    )
    assert longest < least or max(tree.parents) >= 0


def shared(one: list[int], other: list[int]) -> int:
    return next(
        n for n in reversed(range(min(len(one), len(other)))) if one[:n] == other[:n]
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"segment_parents": None}, "also needs segment_parents"),
        ({"segment_lengths": torch.tensor([30, 6])}, "2 segments"),
        (
            {"input_ids": torch.zeros(1, 30, dtype=torch.int64)},
            "add up to 35, input_ids has 30",
        ),
        (
            {"input_ids": torch.zeros(2, 35, dtype=torch.int64)},
            "one row, input_ids has 2",
        ),
        ({"attention_mask": torch.ones(1, 35)}, "no attention_mask; leave it out"),
        (
            {"labels": torch.zeros(1, 34, dtype=torch.int64)},
            "labels must be integers of shape",
        ),
        (
            {
                "input_ids": torch.zeros(1, 36, dtype=torch.int64),
                "labels": torch.zeros(1, 36).long(),
            },
            "must be -100",
        ),
    ],
)
def test_what_is_no_tree_of_a_batch_is_refused(changed, message):
    with pytest.raises(rs.RingspanError, match=message):
        parts(whole_batch(FAMILY) | changed, 2)
    # of rows too
    with pytest.raises(rs.ConfigError, match="unknown prefix_loss 'twice'"):
        parts({"input_ids": tokens(1, 6)}, 2, prefix_loss="twice")


def test_rows_that_cannot_share_are_refused():
    for rows, labels, message in (
        ([], None, "none of them empty"),
        ([[1], []], None, "none of them empty"),
        ([[1, 2, 3]] * 2, [[1, 2, 3], [-100, 2, 3]], "row 0 has other labels"),
        ([[1, 2]], [[1]], "a label for each token"),
    ):
        with pytest.raises(rs.UnsupportedError, match=message):
            rs.share_prefixes(rows, labels, min_shared_tokens=1)


def refusal(mesh: DeviceMesh, kind: str) -> str:
    model = rs.parallelize(tiny_model(kind), mesh)
    with pytest.raises(rs.UnsupportedError) as error:
        model(**rs.shard_batch(whole_batch(FAMILY), mesh))
    return str(error.value)


def test_layers_that_compute_no_trees_are_refused(pool):
    for kind, reason in (("bloom", "ALiBi"), ("deepseek_v32", "layers with an index")):
        for message in pool.run(refusal, 2, kind):
            assert f"does not go with {reason}" in message and message.endswith(
                "give it separate rows"
            )
