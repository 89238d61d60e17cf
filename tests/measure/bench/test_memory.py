"""Memory that is counted against formulas, and the search for the longest sequence against made-up memories."""

import math
import os
import resource
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.costs import saved_bytes
from ringspan.core.schedule.choice import num_inputs
from ringspan.measure.bench import context
from ringspan.measure.bench.context import ContextCase, next_length, ran_out_of_memory, run
from ringspan.measure.bench.memory import held_activations, step_bytes
from ringspan.report.charts import category_picture
from ringspan.torch.memory import offload
from ringspan.torch.memory.checkpointing import choose_checkpoint, layer_sizes
from ringspan.torch.runtime.launch import launch
from tests.torch.models import build, config, tokens

LENGTH = 64


def a_layer_saves(config: Any, policy: Any, dtype: torch.dtype, *, feedforward_in_chunks: bool = False) -> int:
    return saved_bytes(layer_sizes(config), dtype.itemsize, policy, feedforward_in_chunks=feedforward_in_chunks)


def held(mesh: DeviceMesh, dtype: torch.dtype, options: dict[str, Any]) -> list[int]:
    """Bytes that models of two and of three layers keep."""
    offload.MIN_BYTES = 0
    counts = []
    for layers in (2, 3):
        model = rs.parallelize(build("llama", num_hidden_layers=layers).to(dtype), mesh, **options)
        ids = tokens(1, LENGTH)
        counts.append(held_activations(model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)))
    return counts


CASES: list[dict[str, Any]] = [
    {"checkpoint": "none"},
    {"checkpoint": "none", "feedforward_chunk_tokens": 16},
    {"checkpoint": "attention"},
    {"checkpoint": "full"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_a_layer_keeps_what_the_formula_says(pool, dtype, options):
    [[two, three]] = pool.run(held, 1, dtype, options)
    chunked = "feedforward_chunk_tokens" in options
    expected = a_layer_saves(config("llama"), options["checkpoint"], dtype, feedforward_in_chunks=chunked)
    assert abs((three - two) / LENGTH / expected - 1) < 0.05


def test_offloaded_layers_keep_nothing(pool):
    [[two, three]] = pool.run(held, 1, torch.float32, {"checkpoint": "attention", "offload": "activations"})
    assert three - two < 0.05 * LENGTH * a_layer_saves(config("llama"), "attention", torch.float32)


def test_auto_takes_what_computes_least_again_and_fits():
    model = config("llama")
    needed = {
        policy: 100 * model.num_hidden_layers * a_layer_saves(model, policy, torch.float32)
        for policy in ("none", "attention", "full")
    }
    assert needed["none"] > needed["attention"] > needed["full"]
    for policy, bytes_ in needed.items():
        assert choose_checkpoint(model, 100, bytes_, torch.float32) == (policy, 1)
        with_two = choose_checkpoint(model, 100, bytes_, torch.float32, layers_per_checkpoint=2)
        assert with_two == (policy, 1 if policy == "none" else 2)
    with pytest.raises(rs.ConfigError, match="larger ring"):
        choose_checkpoint(model, 100, 999, torch.float32)


def test_auto_has_layers_share_an_input_before_it_runs_the_ring_again():
    """32 layers: what they keep falls from step to step, and each is taken until it no longer fits."""
    model = config("llama", num_hidden_layers=32)
    ladder, budget = [], 1 << 40
    while True:
        try:
            step = choose_checkpoint(model, 100, budget, torch.float32)
        except rs.ConfigError as error:
            assert "checkpoint='full' and 4 layers per checkpoint" in str(error)
            break
        ladder.append(step)
        inputs = num_inputs(32, step[1]) if step[0] != "none" else 32
        a_layer, an_input = a_layer_saves(model, step[0], torch.float32), 4 * model.hidden_size
        budget = 100 * (32 * (a_layer - an_input) + inputs * an_input) - 1
    assert ladder == [("none", 1), *((policy, n) for policy in ("attention", "full") for n in (1, 2, 4))]


def bytes_of_a_step(mesh: DeviceMesh, chunk: int) -> dict[str, int]:
    model = rs.parallelize(build("llama", vocab_size=4096), mesh, loss_chunk_tokens=chunk)
    ids = tokens(1, 1024)
    counted = step_bytes(model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))
    return counted | {"elements": sum(p.numel() for p in model.parameters())}


def test_the_categories_of_a_step(pool):
    for whole, chunked in zip(pool.run(bytes_of_a_step, 2, 1000), pool.run(bytes_of_a_step, 2, 8), strict=True):
        share = whole["elements"] * 4 / 2
        for category, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert whole[category] == chunked[category]
            assert abs(whole[category] / (times * share) - 1) < 0.02
        logits = 512 * 4096 * 4
        assert whole["temporaries"] - chunked["temporaries"] > 0.5 * logits
        assert whole["communication"] > 0 and whole["activations"] > 0


def search(fixed: float, per_token: float, budget: int, longest: int = 1 << 24, limit: float = math.inf) -> Any:
    trials: list[dict[str, Any]] = []
    length = 1024
    while length and len(trials) < 20:
        peak = fixed + per_token * length
        trials.append({"length": length, "peak_bytes": peak if peak < limit else math.inf})
        length = next_length(trials, budget, longest)
    return trials


@pytest.mark.parametrize(("fixed", "per_token"), [(0, 1e3), (1e9, 1e4), (1.9e9, 1e4), (1e6, 3.3e5)])
@pytest.mark.parametrize("limit", [math.inf, 2.5e9])
def test_the_search_ends_near_the_longest_that_fits(fixed, per_token, limit):
    budget = 2 * 10**9
    trials = search(fixed, per_token, budget, limit=limit)
    assert len(trials) < 12
    best = max(t["length"] for t in trials if t["peak_bytes"] <= budget)
    assert best > 0.95 * (budget - fixed) / per_token - 16
    assert len({t["length"] for t in trials}) == len(trials), "no length twice"


def test_the_search_knows_its_bounds():
    assert max(t["length"] for t in search(0, 1, 10**12, longest=5000)) <= 5000
    assert next_length([{"length": 1024, "peak_bytes": 10}], 9, 1 << 20) == 0, "the first one did not fit"


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_small_context_is_found(monkeypatch):
    case = ContextCase(
        ranks=1,
        budget_bytes=8 * 10**9,
        layers=1,
        hidden_size=48,
        vocabulary=256,
        start_tokens=256,
        max_length=300,
        max_trials=2,
        rows_in=3,
    )
    result = run(case)
    assert 256 <= result["max_length_tokens"] <= 300 and result["step_seconds"] > 0
    assert result["budget_bytes"] == case.budget_bytes and result["options"]["checkpoint"] == "attention"
    monkeypatch.setattr(context, "_try", lambda *_: result["trials"][0])
    with pytest.raises(rs.ConfigError, match="raise it"):
        run(replace(case, budget_bytes=1))


def test_what_the_disk_has_no_room_for_is_not_tried(monkeypatch):
    """In bfloat16 a layer of the 100M model keeps its input and output, 768 numbers each, and 12 float32 lse."""
    a_token, tried = 12 * (2 * 768 * 2 + 12 * 4), []

    def small(case, length):
        tried.append(length)
        return {"length": length, "peak_bytes": length, "step_seconds": 1.0, "parameters": 1}

    monkeypatch.setattr(context, "_try", small)
    monkeypatch.setattr(context.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5000 * a_token + 1))
    assert run(ContextCase(dtype="bfloat16"))["max_length_tokens"] == max(tried) <= 5000 < 1.03 * max(tried)
    with pytest.raises(rs.ConfigError, match="5,000 tokens; set TMPDIR"):
        run(ContextCase(dtype="bfloat16", start_tokens=5001))
    assert max(tried) <= 5000
    assert run(ContextCase(dtype="bfloat16", options="off", max_length=9000))["max_length_tokens"] > 8000


def test_the_picture_is_to_scale():
    row = {"ring": 2, "tokens_per_rank": 64, "checkpoint": "full", "variant": "plain"}
    rows = [row | {"bytes": {"activations": 300, "parameters": 100}}, row | {"bytes": {"activations": 100}}]
    picture = category_picture(rows)
    assert picture is not None
    patches = [patch for patch in picture.axes[0].patches if (patch.get_gid() or "").startswith("bar|")]
    bars = [(patch.get_gid()[4:].split(":")[0], float(np.ptp(patch.get_path().vertices[:, 0]))) for patch in patches]
    assert [name for name, _ in bars] == ["activations", "parameters", "activations"]
    assert bars[0][1] == pytest.approx(3 * bars[1][1], rel=1e-2) == pytest.approx(3 * bars[2][1], rel=1e-2)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _out_of_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    torch.zeros(1 << 34)


def _wrong() -> None:
    raise RuntimeError("a shape does not fit")


@pytest.mark.parametrize(("end", "memory"), [(_killed, True), (_out_of_memory, True), (_wrong, False)])
def test_lack_of_memory_is_told_from_other_ends(end, memory):
    with pytest.raises(RuntimeError) as failed:
        launch(end, 1, threads=1)
    assert ran_out_of_memory(failed.value) is memory
