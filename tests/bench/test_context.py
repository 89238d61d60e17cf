"""``benchmarks.context``: the search, and what a thin ring sends; ``benchmarks.memory``: a step's bytes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from benchmarks import context
from benchmarks.memory import step_bytes
from benchmarks.thin import thin_attention
from ringspan.torch.engine.transport.exchange import COUNTERS
from tests.torch.models import build, tokens


@pytest.mark.parametrize(("fixed", "per_token"), [(0, 1e3), (1.9e9, 1e4), (1e6, 3.3e5)])
@pytest.mark.parametrize("limit", [math.inf, 2.5e9])
def test_the_search_ends_near_the_longest_that_fits(fixed, per_token, limit):
    budget, trials, length = 2 * 10**9, list[dict[str, Any]](), 1024
    while length and len(trials) < 12:
        peak = fixed + per_token * length
        trials.append(
            {"length": length, "peak_bytes": peak if peak < limit else math.inf}
        )
        length = context.next_length(trials, budget, 1 << 24)
    assert not length and len({t["length"] for t in trials}) == len(trials), (
        "no length twice"
    )
    best = max(t["length"] for t in trials if t["peak_bytes"] <= budget)
    assert best > 0.95 * (budget - fixed) / per_token - 16


def test_what_the_disk_has_no_room_for_is_not_tried(monkeypatch):
    """In bfloat16 a layer of the 100M model keeps its input and output, 768 numbers each, and 12 float32 lse."""
    a_token, tried = 12 * (2 * 768 * 2 + 12 * 4), []

    def small(case, length):
        tried.append(length)
        return {
            "length": length,
            "peak_bytes": length,
            "step_seconds": 1.0,
            "parameters": 1,
        }

    monkeypatch.setattr(context, "_try", small)
    monkeypatch.setattr(
        context.shutil,
        "disk_usage",
        lambda folder: SimpleNamespace(free=5000 * a_token + 1),
    )
    case = context.ContextCase(dtype="bfloat16")
    assert (
        context.run(case)["max_length_tokens"] == max(tried) <= 5000 < 1.03 * max(tried)
    )


def traffic(mesh: DeviceMesh, every: int) -> tuple[int, int]:
    """Messages and bytes that this rank sends for a step of attention."""
    before = COUNTERS.num_sends, COUNTERS.sent_bytes
    with thin_attention(every):
        q, k, v = (
            torch.randn(1, heads, 48, 16, requires_grad=True) for heads in (4, 2, 2)
        )
        rs.ring_attention(q, k, v, group=mesh.get_group("ring")).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))
    return COUNTERS.num_sends - before[0], COUNTERS.sent_bytes - before[1]


def test_a_ring_of_sampled_rows_sends_as_much_as_of_all_rows(pool):
    whole, thinned = (pool.run(traffic, 2, every) for every in (1, 8))
    assert whole == thinned and whole[0][1] > 0


def bytes_of_a_step(mesh: DeviceMesh, chunk: int) -> dict[str, int]:
    model = rs.parallelize(
        build("llama", vocab_size=4096), mesh, loss_chunk_tokens=chunk
    )
    ids = tokens(1, 512)
    counted = step_bytes(model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))
    return counted | {"elements": sum(p.numel() for p in model.parameters())}


def test_the_categories_of_a_step(pool):
    for whole, chunked in zip(
        pool.run(bytes_of_a_step, 2, 1000), pool.run(bytes_of_a_step, 2, 8), strict=True
    ):
        share = whole["elements"] * 4 / 2
        for category, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert whole[category] == chunked[category]
            assert abs(whole[category] / (times * share) - 1) < 0.02
        logits = 256 * 4096 * 4
        assert whole["temporaries"] - chunked["temporaries"] > 0.5 * logits
        assert whole["communication"] > 0 and whole["activations"] > 0
