"""Steps with given routes, on a ring and on one process whose routers are answered by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ringspan as rs
from ringspan.proof.float64 import in_float64_of
from tests.torch import models
from tests.torch.engine.recurrence.models import build

LENGTH, EXPERTS, CHOSEN = 37, 4, 2
_MOE: Final = {"num_hidden_layers": 3, "num_experts_per_tok": CHOSEN}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "deepseek_v3": {"n_group": 2, "n_routed_experts": EXPERTS},
}
HYBRIDS: Final = ("qwen3_next", "glm_moe_dsa")
SPARSE: Final = {
    "deepseek_v3": [1, 2],
    "qwen3_next": [0, 1, 2, 3],
    "glm_moe_dsa": [1, 3],
}
"""Layers with a router, where they are not the first three."""


def options_of(kind: str) -> dict[str, Any]:
    given = KINDS[kind] | _MOE
    if kind == "gpt_oss":
        given["layer_types"] = given["layer_types"][:3]
    return given


def layers_of(kind: str) -> int:
    return 4 if kind in HYBRIDS else 3


def model_of(kind: str, **changes: Any) -> Any:
    if kind in HYBRIDS:
        return build(kind, torch.float64)
    model = in_float64_of(models.build(kind, **options_of(kind) | changes))
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def routes_of(kind: str, seed: int = 3) -> Tensor:
    """Experts (B, S, layers, K) at random, and every fifth token's left to its router."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.rand(2, LENGTH, layers_of(kind), EXPERTS, generator=random)
    routes = drawn.topk(CHOSEN).indices
    routes[:, ::5] = -1
    return routes


def batch_of(data: str, routes: Tensor | None) -> dict[str, Tensor]:
    rows = 2
    ids = models.tokens(rows, LENGTH)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if data == "padded":
        mask = torch.ones_like(ids)
        mask[0, :6], mask[1, -4:] = 0, 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 6] = -100  # which padding would predict
        batch |= {"attention_mask": mask, "labels": labels}
    if data == "packed":
        positions = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])
        batch["position_ids"] = positions.expand(rows, -1).contiguous()
        batch["labels"][:, 11] = -100  # which the document before would predict
    return batch if routes is None else batch | {"routes": routes}


@contextmanager
def answered(sparse: list[int], experts: int, routes: Tensor) -> Iterator[list[Tensor]]:
    """Answer the routers of one process in their order, and note what each chose."""
    plain, seen = torch.topk, []

    def topk(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(scores, *args, **kwargs)
        if scores.ndim != 2 or scores.shape[1] != experts:
            return found
        given = routes[:, :, sparse[len(seen)]].flatten(0, 1)
        chosen = torch.where(given < 0, found.indices, given)
        found = torch.return_types.topk((scores.gather(1, chosen), chosen))
        seen.append(found.indices)
        return found

    with patch.object(torch, "topk", topk):
        yield seen


@cache
def expected(kind: str, data: str) -> tuple[float, dict[str, Tensor | None], Tensor]:
    """Loss, gradients and routes (B, S, layers, K) of one process whose routers are answered."""
    model, batch, routes = model_of(kind), batch_of(data, None), routes_of(kind)
    labels, sparse = batch.pop("labels"), SPARSE.get(kind, [0, 1, 2])
    cuts = [0, 11, LENGTH] if data == "packed" else [0, LENGTH]
    logits, targets, chosen = [], [], []
    for start, stop in pairwise(cuts):  # documents are rows of their own
        part = {n: x[:, start:stop] for n, x in batch.items() if n != "position_ids"}
        with answered(sparse, EXPERTS, routes[:, start:stop]) as seen:
            logits.append(model(**part).logits[:, :-1].flatten(0, 1))
        chosen.append(seen)
        targets.append(labels[:, start + 1 : stop].flatten())
    loss = cross_entropy(torch.cat(logits), torch.cat(targets))
    loss.backward()
    routes = torch.full((2, LENGTH, layers_of(kind), CHOSEN), -1)
    for start, stop, seen in zip(cuts, cuts[1:], chosen, strict=False):
        for number, one in zip(sparse, seen, strict=True):
            routes[:, start:stop, number] = one.view(2, stop - start, CHOSEN)
    return loss.item(), models.whole_gradients(model), routes


def step(mesh: Any, kind: str, data: str, options: dict[str, Any]) -> Any:
    how = {"layout": options.get("layout", "zigzag"), "folds": options.get("folds", 1)}
    model = rs.parallelize(model_of(kind), mesh, **options)
    batch = rs.shard_batch(batch_of(data, routes_of(kind)), mesh, **how)
    recorded = rs.token_routes(model, batch)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), models.whole_gradients(model), recorded


def check(pool: Any, kind: str, data: str, ranks: int, options: dict[str, Any]) -> None:
    """Hold a step of a ring to one process."""
    loss, gradients, routes = expected(kind, data)
    real = batch_of(data, None).get("attention_mask", torch.ones(2, LENGTH)) > 0
    for found, found_gradients, recorded in pool.run(step, ranks, kind, data, options):
        assert found == pytest.approx(loss, abs=1e-9)
        for name, gradient in gradients.items():
            if gradient is None:
                assert found_gradients[name] is None, name
            else:
                torch.testing.assert_close(
                    found_gradients[name], gradient, rtol=1e-9, atol=1e-9
                )
        assert torch.equal(recorded.long()[real], routes[real])
