"""Bytes and seconds of generation against numbers that were computed by hand, and against what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from ringspan.core.arguments import PREFILL_TOKENS, is_split
from ringspan.core.geometry.mask import causal
from ringspan.core.geometry.shares import Shares
from ringspan.core.schedule.choice import cheaper_route
from ringspan.core.schedule.timing import Speeds, forward_pass
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cluster.devices import Device
from ringspan.plan.generation.cost import (
    COLLECTIVE_SECONDS,
    Text,
    _fullest,
    _Times,
    text_bytes,
    text_cost,
)
from ringspan.plan.model.configs import from_config
from tests.cases import pairwise

MEASURED = (
    Path(__file__).parents[3] / "benchmarks" / "results" / "generate-cpu-amd.json"
)
# Two layers of 8 query and 2 key/value heads of 16 numbers. Weights of a layer: 2 x 128 x 128 + 2 x 128 x 32 for
# attention and 3 x 128 x 200 for the feed-forward: 117,760. Of the head: 500 x 128 = 64,000.


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 500,
}


def shape_of(kind, **sizes):
    return from_config(
        AutoConfig.for_model(
            kind, **{**SIZES, "intermediate_size": 200, **sizes}
        ).to_dict(),
        "tiny",
    )


SHAPE = shape_of("llama", num_key_value_heads=2)
LAYER, HEAD = 117_760, 64_000
DEVICE = Device(
    name="slow", title="slow device", flops=1e9, memory_bytes=10**9, memory_bandwidth=1e7, intra_node_bandwidth=1e6,
    inter_node_bandwidth=5e5, devices_per_node=2, matmul_efficiency=0.5, attention_efficiency=0.25,
)  # fmt: skip


def test_bytes_by_hand():
    """Three prompts of 1,000 tokens on two ranks: 500 of each on a rank, and of 130 tokens two blocks of 64 on one.

    131 tokens are written, of which the last is not kept. A token is 2 layers x 64 numbers x 2 bytes = 256 bytes.
    """
    weights, cache, _ = text_bytes(
        SHAPE, Text(prompt=1000, new_tokens=131, batch=3, ring=2)
    )
    assert cache == 3 * (500 + 128) * 256
    whole = 2 * SHAPE.parameters
    assert SHAPE.parameters == 2 * LAYER + 2 * HEAD + 2 * 2 * 128 + 128
    assert weights == whole + whole // 2, "whole, and the shards that FSDP keeps"
    sharded, _, _ = text_bytes(
        SHAPE, Text(prompt=1000, new_tokens=131, batch=3, ring=2, weights="sharded")
    )
    assert sharded == whole // 2 + whole, "of two layers two are gathered at once"
    alone, cache, _ = text_bytes(SHAPE, Text(prompt=1000, new_tokens=131, batch=3))
    assert (alone, cache) == (whole, 3 * 1130 * 256)
    halved, cache, _ = text_bytes(SHAPE, Text(prompt=1000, new_tokens=131, tp=2))
    assert cache == 1130 * 128, "one of two key/value heads"
    assert halved == 2 * SHAPE.split(2).parameters


def test_seconds_of_a_token_by_hand():
    """After 1,000 tokens on one device: 299,520 weights of two bytes and 1,001 tokens of the cache at 1e7 bytes/s; on
    two the cache is halved (500 and the new one), and each of three collectives takes 20 us and its bytes: twice
    8 heads x 17 numbers of four bytes, and 500 logits of two.
    """
    alone = text_cost(SHAPE, Text(prompt=1000, new_tokens=2), DEVICE)
    assert alone.token_parts["weights"] == pytest.approx((2 * LAYER + HEAD) * 2 / 1e7)
    assert alone.token_parts["cache"] == pytest.approx(1001 * 256 / 1e7)
    assert alone.token_parts["sent"] == alone.collectives_per_token == 0
    two = text_cost(SHAPE, Text(prompt=1000, new_tokens=2, ring=2), DEVICE)
    assert two.token_parts["weights"] == alone.token_parts["weights"]
    assert two.token_parts["cache"] == pytest.approx(501 * 256 / 1e7)
    assert two.collectives_per_token == 3
    assert two.token_parts["sent"] == pytest.approx(
        3 * 20e-6 + (2 * 8 * 17 * 4 + 500 * 2) / 1e6
    )
    apart = text_cost(SHAPE, Text(prompt=1000, new_tokens=2, ring=4), DEVICE)
    assert apart.token_parts["sent"] == pytest.approx(
        3 * COLLECTIVE_SECONDS[False] + (2 * 3 * 8 * 17 * 4 + 1000) / 5e5
    )


def test_sharded_weights_arrive_for_every_token():
    """Half of all parameters at 1e6 bytes/s, which is more than reading them takes."""
    cost = text_cost(
        SHAPE, Text(prompt=1000, new_tokens=2, ring=2, weights="sharded"), DEVICE
    )
    assert cost.token_parts["weights"] == pytest.approx(SHAPE.parameters * 2 / 2 / 1e6)
    assert cost.collectives_per_token == 6


@pytest.mark.parametrize(("batch", "experts"), [(1, 2), (3, 8 * (1 - 0.75**3))])
def test_experts_are_read_that_a_token_is_sent_to(batch, experts):
    """Of 8 experts of 3 x 128 x 40 weights a token is sent to 2 by a router of 8 x 128; three to 4.6, if at random."""
    sizes = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
    }
    cost = text_cost(
        shape_of("mixtral", **sizes),
        Text(prompt=1000, new_tokens=2, batch=batch),
        DEVICE,
    )
    layer = 40_960 + 8 * 128 + experts * 3 * 128 * 40
    assert cost.token_parts["weights"] == pytest.approx((2 * layer + HEAD) * 2 / 1e7)


# Heads of 16 numbers and 8 rotary ones, of latents of 32. An index of 4 heads of 16 chooses 64 tokens.
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 24,
}
LATENT |= {"first_k_dense_replace": 2, "num_key_value_heads": 8}
INDEX = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 16}


def test_latents_are_read_by_a_ring_and_expanded_by_one_device():
    """40 numbers of a token, and on one device twice 8 heads' 24 and 16; results of two have 32 and a log-sum-exp."""
    shape, text = shape_of("deepseek_v3", **LATENT), Text(prompt=1000, new_tokens=2)
    assert text_bytes(shape, text)[1] == 2 * 1001 * 40 * 2
    alone, two = (text_cost(shape, replace(text, ring=ring), DEVICE) for ring in (1, 2))
    assert alone.token_parts["cache"] == pytest.approx(
        2 * 1001 * (40 + 2 * 8 * 40) * 2 / 1e7
    )
    assert two.token_parts["cache"] == pytest.approx(2 * 501 * 40 * 2 / 1e7)
    assert two.token_parts["sent"] == pytest.approx(
        3 * 20e-6 + (2 * 8 * 33 * 4 + 500 * 2) / 1e6
    )
    # A prompt's second chunk expands the first again: 16 + 16 numbers of 8 heads out of 32.
    chunks = (
        _Times(shape, replace(text, prompt=8192), DEVICE)._chunk(start, 4096)[0]
        for start in (4096, 0)
    )
    pairs = 2 * 8 * (24 + 16) * 4096 * 4096 / 2.5e8
    assert next(chunks) - next(chunks) == pytest.approx(
        2 * (pairs + 2 * 4096 * 32 * 8 * 32 / 5e8)
    )


def test_an_index_scores_all_and_attends_to_some():
    """It keeps 16 numbers of a token besides latents, of which 8 heads attend to 40 and 32, and 64 candidates of 8
    bytes are found before results are merged. All tokens are fetched while a prompt is read.
    """
    shape, text = (
        shape_of("deepseek_v32", **LATENT, **INDEX),
        Text(prompt=1000, new_tokens=2, ring=2),
    )
    cost, times = text_cost(shape, text, DEVICE), _Times(shape, text, DEVICE)
    assert (
        cost.cache_bytes == 2 * 501 * (40 + 16) * 2 and cost.collectives_per_token == 5
    )
    assert cost.token_parts["cache"] == pytest.approx(cost.cache_bytes / 1e7)
    assert cost.token_parts["sent"] == pytest.approx(
        5 * 20e-6 + (2 * (8 * 33 * 4 + 64 * 8) + 500 * 2) / 1e6
    )
    flops = sum(
        2 * 4 * 16 * count + 2 * 8 * (40 + 32) * min(count, 64)
        for count in range(1, 1001)
    )
    assert times._computed(shape.kinds[0], 1000, 0) == pytest.approx(flops / 2 / 2.5e8)
    assert times._sent(shape.kinds[0], 1000, 0) == pytest.approx(
        500 * (40 + 16) * 2 / 1e6
    )


def test_seconds_to_the_first_token_by_hand():
    """1,000 tokens on one device: 2 FLOPs per weight and token at half of 1e9, and 4 x 128 FLOPs per pair at a
    quarter. The head sees one token, whose weights are read.
    """
    cost = text_cost(SHAPE, Text(prompt=1000, new_tokens=1), DEVICE)
    pairs = 1000 * 1001 // 2
    expected = 2 * (2 * LAYER * 1000 / 5e8 + 512 * pairs / 2.5e8) + HEAD * 2 / 1e7
    assert cost.first_token_seconds == pytest.approx(expected)
    assert cost.seconds == cost.first_token_seconds, "there is no other token"
    assert cost.exposed_seconds == 0


def test_all_in_all_is_the_first_token_and_those_after_it():
    """Of 101 tokens 100 come after the first; the cache grows evenly, so their mean is that of the ends."""
    text = Text(prompt=1000, new_tokens=101)
    cost, times = text_cost(SHAPE, text, DEVICE), _Times(SHAPE, text, DEVICE)
    each = [sum(times.writing(1000 + written).values()) for written in range(100)]
    assert cost.seconds == pytest.approx(cost.first_token_seconds + sum(each))
    assert cost.token_seconds == pytest.approx(each[-1])


@pytest.mark.parametrize("ring", [2, 3, 8])
@pytest.mark.parametrize("start", [0, 4096, 65_536])
def test_a_chunk_takes_what_the_schedule_says(ring, start):
    """The bound is what the last hop of a schedule, which nothing hides, adds."""
    text = Text(prompt=start + 4096 * ring, new_tokens=1, ring=ring)
    device = Device(
        **{**vars(DEVICE), "devices_per_node": 8, "intra_node_bandwidth": 3e6}
    )
    times = _Times(SHAPE, text, device)
    shares = Shares(ring)
    if start:
        shares.split(start)
    queries = shares.split(4096 * ring)
    keys, shape = shares.held(), Shape(1, 8, 2, 16, 16, 2)
    speeds = Speeds(1e9 * 0.25, 3e6, 3e6, 8)
    route = cheaper_route(queries, keys, causal(), shape)
    found = forward_pass(queries, causal(), route, shape, speeds, keys).seconds
    of_chunk = SHAPE.kinds[0], 4096 * ring, start
    expected = max(times._computed(*of_chunk), times._sent(*of_chunk))
    assert expected == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize(
    ("ring", "window", "tokens"),
    pairwise(
        [1, 2, 3, 8], [None, 100, 5000], [(1, 1), (37, 0), (1000, 700), (70_001, 40)]
    ),
)
def test_the_fullest_rank_is_that_of_the_cache(ring, window, tokens):
    """Never less than it holds, and at most two blocks more: who holds less is written to first."""
    read, written = tokens
    text = Text(prompt=read, new_tokens=written + 1, ring=ring)
    shares = Shares(ring)
    for start in range(0, read, PREFILL_TOKENS * ring):
        count = min(PREFILL_TOKENS * ring, read - start)
        (shares.split if is_split(count, ring) else shares.deal)(count)
    for _ in range(written):
        shares.deal(1)
    held = max(shares.counts(max(0, read + written - (window or read + written))))
    found = _fullest(text, read, written, window)
    assert held <= found <= held + 128


def test_bytes_are_near_those_that_were_measured():
    """The model of ``benchmarks.generation``, whose peak while reading counts gathered weights, not their shards."""
    measured = json.loads(MEASURED.read_text())
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape = shape_of("llama", **sizes, intermediate_size=768, vocab_size=4096)
    _, cache, work = text_bytes(
        shape, Text(prompt=32_768, new_tokens=33, ring=2, dtype="float32")
    )
    assert cache == pytest.approx(measured["cache_bytes_per_rank"], rel=0.01)
    assert work + cache + 4 * shape.parameters == pytest.approx(
        measured["peak_bytes"], rel=0.1
    )
