"""An index that learns from attention on the ring, against transformers' own scores and attention on one process."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ringspan as rs
from tests.cases import long
from tests.torch.engine.recurrence.models import build
from tests.torch.engine.recurrence.test_models import PACKED, batch_of, on_a_ring, worst
from tests.torch.models import whole_gradients

WHOLE = [[7, 7, 7, 7, 7, 4]] * 2


def scores_of(index: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """The scores of a call of transformers' index, which has no gradients and chooses by them."""
    found: list[Tensor] = []

    def sort(scores: Tensor, **kwargs: Any) -> Any:  # by which float64's index chooses
        found.append(scores)
        return torch.sort(scores, **kwargs)

    def detached(x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "sort", sort)
        forward = inspect.unwrap(type(index).forward)
        forward(
            index,
            *map(detached, args),
            **{name: detached(x) for name, x in kwargs.items()},
        )
    return found[0]


def one_process(kind: str, stage: str, documents: list[Tensor]) -> Any:
    """Losses and gradients of documents, each alone: of the next tokens in a row of all, and of the index."""
    model, calls = build(kind, torch.float64), []
    for index in (
        module for module in model.modules() if hasattr(module, "index_topk")
    ):
        index.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
        index.index_topk = 10**6 if stage == "dense" else index.index_topk
    logits, divergence = [], torch.zeros((), dtype=torch.float64)
    for ids in documents:
        calls.clear()
        output = model(input_ids=ids[None], output_attentions=True, use_cache=False)
        logits.append(output.logits[0])
        for index, args, kwargs, _ in list(calls):
            p = output.attentions[index.layer_idx].detach().sum(1)
            p /= p.sum(-1, keepdim=True)
            log_softmax = (
                scores_of(index, args, kwargs)
                .masked_fill(p == 0, -torch.inf)
                .log_softmax(-1)
            )
            divergence = (
                divergence
                + (torch.xlogy(p, p) - p * log_softmax.masked_fill(p == 0, 0)).sum()
            )
    return model, logits, divergence / sum(map(len, documents))


def expected(kind: str, stage: str, rows: list[list[Tensor]]) -> Any:
    model, logits, index_loss = one_process(
        kind, stage, [each for row in rows for each in row]
    )
    targets = [torch.cat((torch.cat(row)[1:], torch.tensor([-100]))) for row in rows]
    loss = cross_entropy(torch.cat(logits), torch.cat(targets))
    (loss + index_loss).backward()
    return (loss + index_loss).detach(), {
        name: p.grad for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("kind", "stage", "ranks", "layout", "options"),
    [
        *long(("deepseek_v32", "sparse", 2, "zigzag", {})),
        (
            "glm_moe_dsa",
            "dense",
            3,
            "contiguous",
            {"documents": PACKED[0], "checkpoint": "full"},
        ),
        *long(
            (
                "hy_v4",
                "sparse",
                3,
                "zigzag",
                {"documents": PACKED[2], "layers_per_checkpoint": 2},
            )
        ),
        ("hy_v4", "dense", 1, "zigzag", {"checkpoint": "none"}),
        # Documents of no more tokens than an index chooses, which it learns from all the same.
        *long(
            (
                "deepseek_v32",
                "sparse",
                2,
                "zigzag",
                {"documents": WHOLE, "layers_per_checkpoint": 2},
            ),
            (
                "glm_moe_dsa",
                "dense",
                2,
                "contiguous",
                {"documents": WHOLE, "layers_per_checkpoint": 3},
            ),
            (
                "hy_v4",
                "sparse",
                3,
                "zigzag",
                {"documents": WHOLE, "layers_per_checkpoint": 2, "checkpoint": "full"},
            ),
        ),
        ("axk2", "dense", 2, "striped", {"mask": (5, 30)}),
        *long(("dots3_note_text", "sparse", 3, "balanced", {"documents": PACKED[1]})),
    ],
)
def test_loss_and_gradients_of_the_index_equal_one_process(
    pool, kind, stage, ranks, layout, options
):
    ids, documents = batch_of(2, 39), options.get("documents", [[39], [39]])
    rows = [[*row.split(each)] for row, each in zip(ids, documents, strict=True)]
    if "mask" in options:  # padding on the left, and on the right
        first, stop = options["mask"]
        options = options | {
            "mask": torch.stack(
                (torch.arange(39) >= first, torch.arange(39) < stop)
            ).long()
        }
        rows = [[ids[0, first:]], [ids[1, :stop]]]
    truth = expected(kind, stage, rows)
    found = pool.run(
        on_a_ring,
        ranks,
        kind,
        torch.float64,
        layout,
        ids,
        options | {"index_loss": stage},
    )
    assert worst(found, truth) < 1e-9


def taught_alone(mesh: Any, kind: str, ids: Tensor, is_evaluated: bool) -> Any:
    model = build(kind, torch.float64).train(not is_evaluated)
    for name, p in model.named_parameters():
        p.requires_grad_("indexer" in name)
    model = rs.parallelize(model, mesh, index_loss="dense")
    replica = mesh["replicate"].get_local_rank()
    batch = {
        "input_ids": ids[replica : replica + 1],
        "labels": ids[replica : replica + 1],
    }
    output = model(**rs.shard_batch(batch, mesh), num_items_in_batch=2 * 2 * 38)
    output.loss.backward()
    gradients = whole_gradients(model)
    with pytest.raises(
        rs.ConfigError, match="no parameter of an index requires gradients"
    ):
        rs.parallelize(
            build(kind, torch.float64).requires_grad_(requires_grad=False),
            mesh,
            index_loss="dense",
        )
    return output.loss.detach() + output.index_loss, gradients


# from_pretrained's first
@pytest.mark.parametrize(
    "is_evaluated", [True, *long(False)], ids=["evaluation", "training"]
)
def test_an_index_learns_alone_and_weighs_as_its_targets(pool, is_evaluated):
    ids = batch_of(2, 39)
    loss, gradients = expected("deepseek_v32", "dense", [[row] for row in ids])
    half = {
        name: gradient / 2 if "indexer" in name else None
        for name, gradient in gradients.items()
    }
    found = pool.run(taught_alone, 4, "deepseek_v32", ids, is_evaluated, replicate=2)
    assert worst(found, (loss / 2, half)) < 1e-9
