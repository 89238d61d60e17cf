"""Bytes and seconds of generation against numbers that were computed by hand, and against what was measured."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from ringspan.core.arguments import PREFILL_TOKENS, is_split
from ringspan.core.geometry.mask import causal
from ringspan.core.geometry.shares import Shares
from ringspan.core.schedule.choice import cheaper_route
from ringspan.core.schedule.timing import Speeds, forward_pass
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cluster.devices import Device
from ringspan.plan.generation.cost import COLLECTIVE_SECONDS, Text, _fullest, _Times, text_bytes, text_cost
from ringspan.plan.model.configs import from_config
from tests.cases import pairwise

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "generate-cpu-amd.json"
# Two layers of 8 query and 2 key/value heads of 16 numbers. Weights of a layer: 2 x 128 x 128 + 2 x 128 x 32 for
# attention and 3 x 128 x 200 for the feed-forward: 117,760. Of the head: 500 x 128 = 64,000.


def llama(**sizes):
    return from_config(LlamaConfig(**sizes).to_dict(), "tiny")


SHAPE = llama(
    num_hidden_layers=2, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, intermediate_size=200,
    vocab_size=500,
)  # fmt: skip
LAYER, HEAD = 117_760, 64_000
DEVICE = Device(
    name="slow", title="slow device", flops=1e9, memory_bytes=10**9, memory_bandwidth=1e7, intra_node_bandwidth=1e6,
    inter_node_bandwidth=5e5, devices_per_node=2, matmul_efficiency=0.5, attention_efficiency=0.25,
)  # fmt: skip


def test_bytes_by_hand():
    """Three prompts of 1,000 tokens on two ranks: 500 of each on a rank, and of 130 tokens two blocks of 64 on one.

    131 tokens are written, of which the last is not kept. A token is 2 layers x 64 numbers x 2 bytes = 256 bytes.
    """
    weights, cache, _ = text_bytes(SHAPE, Text(prompt=1000, new_tokens=131, batch=3, ring=2))
    assert cache == 3 * (500 + 128) * 256
    whole = 2 * SHAPE.parameters
    assert SHAPE.parameters == 2 * LAYER + 2 * HEAD + 2 * 2 * 128 + 128
    assert weights == whole + whole // 2, "whole, and the shards that FSDP keeps"
    sharded, _, _ = text_bytes(SHAPE, Text(prompt=1000, new_tokens=131, batch=3, ring=2, weights="sharded"))
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
    assert two.token_parts["sent"] == pytest.approx(3 * 20e-6 + (2 * 8 * 17 * 4 + 500 * 2) / 1e6)
    apart = text_cost(SHAPE, Text(prompt=1000, new_tokens=2, ring=4), DEVICE)
    assert apart.token_parts["sent"] == pytest.approx(3 * COLLECTIVE_SECONDS[False] + (2 * 3 * 8 * 17 * 4 + 1000) / 5e5)


def test_sharded_weights_arrive_for_every_token():
    """Half of all parameters at 1e6 bytes/s, which is more than reading them takes."""
    cost = text_cost(SHAPE, Text(prompt=1000, new_tokens=2, ring=2, weights="sharded"), DEVICE)
    assert cost.token_parts["weights"] == pytest.approx(SHAPE.parameters * 2 / 2 / 1e6)
    assert cost.collectives_per_token == 6


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
    device = Device(**{**vars(DEVICE), "devices_per_node": 8, "intra_node_bandwidth": 3e6})
    times = _Times(SHAPE, text, device)
    shares = Shares(ring)
    if start:
        shares.split(start)
    queries = shares.split(4096 * ring)
    keys, shape = shares.held(), Shape(1, 8, 2, 16, 16, 2)
    speeds = Speeds(1e9 * 0.25, 3e6, 3e6, 8)
    route = cheaper_route(queries, keys, causal(), shape)
    found = forward_pass(queries, causal(), route, shape, speeds, keys).seconds
    expected = max(times._computed(4096 * ring, start, None), times._sent(4096 * ring, start, None))
    assert expected == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize(
    ("ring", "window", "tokens"),
    pairwise([1, 2, 3, 8], [None, 100, 5000], [(1, 1), (37, 0), (1000, 700), (70_001, 40)]),
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
    shape = llama(
        num_hidden_layers=4, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=768,
        vocab_size=4096,
    )  # fmt: skip
    _, cache, work = text_bytes(shape, Text(prompt=32_768, new_tokens=33, ring=2, dtype="float32"))
    assert cache == pytest.approx(measured["cache_bytes_per_rank"], rel=0.01)
    assert work + cache + 4 * shape.parameters == pytest.approx(measured["peak_bytes"], rel=0.1)
