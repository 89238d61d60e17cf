"""Routes through experts: replayed as on one process, recorded as they were, and refused by every rank."""

import re
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import ringspan as rs
from tests.cases import long
from tests.torch import models
from tests.torch.mechanisms.routes.cases import (
    EXPERTS,
    KINDS,
    batch_of,
    check,
    model_of,
    routes_of,
)

OPTIONS: Final = [
    *long(("qwen3_moe", "rows", 2, {"checkpoint": "none"})),
    (
        "qwen3_moe",
        "rows",
        3,
        {"checkpoint": "attention", "feedforward_chunk_tokens": 3},
    ),
    *long(("qwen3_moe", "padded", 2, {"checkpoint": "full"})),
    ("qwen3_moe", "packed", 2, {"checkpoint": "attention", "layout": "striped"}),
    *long(
        (
            "qwen3_moe",
            "rows",
            2,
            {"checkpoint": "attention", "layers_per_checkpoint": 2},
        )
    ),
    ("qwen3_moe", "rows", 2, {"folds": 2, "layout": "contiguous"}),
    *long(
        ("mixtral", "rows", 2, {"checkpoint": "full", "feedforward_chunk_tokens": 5})
    ),
    ("gpt_oss", "rows", 2, {"checkpoint": "attention"}),
    *long(
        ("deepseek_v3", "rows", 2, {"checkpoint": "attention"}),
        (
            "deepseek_v3",
            "padded",
            1,
            {"checkpoint": "none", "feedforward_chunk_tokens": 0},
        ),
    ),
]


@pytest.mark.parametrize(("kind", "data", "ranks", "options"), OPTIONS)
def test_a_step_with_given_routes_equals_one_process(pool, kind, data, ranks, options):
    check(pool, kind, data, ranks, options)


def refused(mesh: Any, kind: str, change: str) -> str:
    options = {"compile": True} if change == "compiled" else {}
    model = model_of(kind) if kind in KINDS else models.build(kind)
    model = rs.parallelize(model, mesh, **options)
    routes = routes_of("qwen3_moe")
    match change:
        case "expert":
            routes[1, 3, 0, 1] = EXPERTS
        case "layers":
            routes = routes[:, :, 1:]
        case "chosen":
            routes = torch.cat([routes, routes[..., :1]], -1)
        case "tokens":
            routes = routes[:, 1:]
        case "numbers":
            routes = routes.float()
    with pytest.raises(rs.UnsupportedError) as raised:
        batch = batch_of("rows", None if change == "recorded" else routes)
        batch = rs.shard_batch(batch, mesh)
        if change == "recorded":
            rs.token_routes(model, batch)
        else:
            model(**batch)
    return str(raised.value)


REFUSALS: Final = [
    ("qwen3_moe", "expert", "name expert 4, and Qwen3MoeModel has those from 0 to 3"),
    ("qwen3_moe", "layers", r"needs \(2, 20, 3\) and the experts of a token"),
    ("qwen3_moe", "chosen", "name 3 experts of a token, and a layer chooses 2"),
    ("qwen3_moe", "tokens", r"have shape \(2, 36, 3, 2\), must have \(2, 37\)"),
    ("qwen3_moe", "numbers", "must be integers"),
    ("qwen3_moe", "compiled", "use compile=False"),
    ("llama", "", "LlamaModel has no mixtures of experts; leave them out"),
    ("llama", "recorded", "LlamaModel has no mixtures of experts"),
]


@pytest.mark.parametrize(("kind", "change", "said"), REFUSALS)
def test_routes_that_do_not_fit_are_refused_by_every_rank(pool, kind, change, said):
    for message in pool.run(refused, 2, kind, change):
        assert re.search(said, message)


def other_routes_on_a_rank(mesh: Any) -> str:
    model = rs.parallelize(model_of("qwen3_moe"), mesh)
    batch = rs.shard_batch(
        batch_of("rows", routes_of("qwen3_moe", seed=mesh.get_rank())), mesh
    )
    with pytest.raises(rs.PeerMismatch) as raised:
        model(**batch)
    return str(raised.value)


def test_ranks_that_were_given_other_routes_say_so(pool):
    for message in pool.run(other_routes_on_a_rank, 2):
        assert "routes" in message


def drifted(mesh: Any) -> Tensor:
    """Routes of a model whose weights have moved, with those of before given and without."""
    model = rs.parallelize(model_of("qwen3_moe"), mesh)
    before = rs.token_routes(model, rs.shard_batch(batch_of("rows", None), mesh))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    kept, moved = (
        rs.token_routes(model, rs.shard_batch(batch_of("rows", routes), mesh))
        for routes in (before, None)
    )
    return torch.stack([(each == before).all(-1) for each in (kept, moved)])


def test_given_routes_are_kept_where_weights_have_moved(pool):
    for kept, moved in pool.run(drifted, 2):
        assert kept.all()
        assert 0.05 < moved.double().mean() < 0.95
