"""FLOPs, traffic and time against the schedule, brute force and published figures."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.planning_tables import dataset_flops_ratio
from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.plan.cluster.hardware import DEVICES, device
from ringspan.plan.cost.cost import (
    block_tokens_for_overlap,
    model_flops,
    step_cost,
)
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import MODELS
from ringspan.train.model import flops_per_token

LLAMA = MODELS["llama-3.1-8b"]
FAST = replace(
    DEVICES["h100-80gb"], intra_node_bandwidth=1e18, inter_node_bandwidth=1e18
)


def test_model_flops_are_those_that_training_reports():
    sizes = {
        "num_attention_heads": 32,
        "head_dim": 128,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    config = SimpleNamespace(**sizes)
    length = 131_072
    expected = length * flops_per_token(config, LLAMA.matrix_parameters, length)
    assert model_flops(LLAMA, length) == pytest.approx(expected, rel=1e-4)


def test_with_free_links_a_step_is_its_flops():
    setting = Setting(length=65_536, ring=4, checkpoint="none")
    ideal = replace(FAST, matmul_efficiency=1.0, attention_efficiency=1.0)
    step = step_cost(LLAMA, setting, ideal, batch=1)
    # The model's FLOPs count backward as twice the forward; attention's own backward is 5 products to forward's 2.
    extra = 2 * LLAMA.attention.out_size * CAUSAL.num_pairs(65_536) * LLAMA.layers
    assert step.seconds == pytest.approx(
        (step.flops + extra) / (4 * ideal.flops), rel=1e-3
    )
    assert step.exposed_seconds == pytest.approx(0, abs=1e-6)
    assert step.mfu == pytest.approx(step.flops / (step.flops + extra), rel=1e-3)


def test_checkpointing_costs_a_forward_pass():
    seconds = {
        name: step_cost(
            LLAMA, Setting(length=131_072, ring=4, checkpoint=name), FAST, 1
        ).seconds
        for name in ("none", "attention", "full")
    }
    assert seconds["none"] < seconds["attention"] < seconds["full"]
    attention = (
        4.0 * LLAMA.attention.out_size * CAUSAL.num_pairs(131_072) / 4 * LLAMA.layers
    )
    again = attention / (FAST.flops * FAST.attention_efficiency)
    assert seconds["full"] - seconds["attention"] == pytest.approx(again, rel=1e-3)


@pytest.mark.parametrize("checkpoint", ["attention", "full"])
def test_recomputed_inputs_cost_three_quarters_of_a_forward_pass(checkpoint):
    setting = Setting(length=131_072, ring=4, checkpoint=checkpoint)
    plain, shared = (
        step_cost(
            LLAMA, replace(setting, layers_per_checkpoint=layers), FAST, 1
        ).seconds
        for layers in (1, 4)
    )
    tokens = 131_072 / 4 * LLAMA.layers
    forward = (
        2 * LLAMA.kinds[0].matrices * tokens / (FAST.flops * FAST.matmul_efficiency)
    )
    if checkpoint == "full":
        pairs = CAUSAL.num_pairs(131_072) / 4 * LLAMA.layers
        forward += (
            4.0
            * LLAMA.attention.out_size
            * pairs
            / (FAST.flops * FAST.attention_efficiency)
        )
    assert shared - plain == pytest.approx(0.75 * forward, rel=1e-3)


def test_an_optimizer_on_the_host_waits_for_link_and_memory():
    h100, setting = DEVICES["h100-80gb"], Setting(length=131_072, ring=4)
    plain, on_host = (
        step_cost(LLAMA, replace(setting, optimizer_on_host=where), h100, 1)
        for where in (False, True)
    )
    numbers = 4 * LLAMA.parameters / 4  # bytes of a rank's float32 weights
    assert on_host.host_bytes - plain.host_bytes == pytest.approx(3 * numbers)
    assert on_host.seconds - plain.seconds == pytest.approx(
        10 * numbers / h100.host_bandwidth
    )


def test_a_link_slower_than_the_block_is_what_a_step_waits_for():
    setting = Setting(length=8192, ring=8)
    slow = device("h100-80gb,intra_node_bandwidth=1e6")
    step = step_cost(LLAMA, setting, slow, batch=1)
    sent = step.ring_bytes + step.shard_bytes
    assert step.seconds == pytest.approx(sent / 1e6, rel=0.05)
    assert step.exposed_seconds > 0.9 * step.seconds


def test_micro_steps_and_replicas_share_a_batch():
    one = step_cost(LLAMA, Setting(length=32_768, ring=4), FAST, batch=1)
    two = step_cost(LLAMA, Setting(length=32_768, ring=4), FAST, batch=2)
    shared = step_cost(
        LLAMA, Setting(length=32_768, ring=4, replicate=2), FAST, batch=2
    )
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert shared.seconds == pytest.approx(one.seconds, rel=1e-6)
    assert shared.mfu == pytest.approx(one.mfu, rel=1e-6)


def test_replicas_sum_their_gradients_once_a_step():
    setting = Setting(length=8192, ring=4, replicate=2)
    one, four = (step_cost(LLAMA, setting, FAST, batch=batch) for batch in (2, 8))
    alone = step_cost(LLAMA, replace(setting, replicate=1), FAST, batch=1)
    summed = 4 * LLAMA.parameters / 4  # half of twice the float32 gradients of a rank
    assert one.shard_bytes == pytest.approx(alone.shard_bytes + summed)
    assert four.shard_bytes == pytest.approx(4 * alone.shard_bytes + summed)


def test_the_published_flops_ratio_at_a_million_tokens():
    hidden = MODELS["gpt-175b"].hidden
    assert round(dataset_flops_ratio(hidden, 1 << 20, 4096), 1) == 14.4


def test_messages_in_fewer_bits_hide_behind_smaller_blocks():
    setting, link = Setting(length=65_536, ring=4, compute_dtype="float32"), 50e9
    exact, half, quarter = (
        block_tokens_for_overlap(
            LLAMA, replace(setting, comm_dtype=comm_dtype), FAST, link
        )
        for comm_dtype in ("exact", "bfloat16", "int8")
    )
    assert (half, quarter) == (exact / 2, exact / 4)


def test_few_tokens_take_the_time_in_which_hosts_launch_layers():
    """A step of 1,024 tokens per rank on an H100 computes for less time than its 32 layers are launched in."""
    setting = Setting(length=8192, ring=8, checkpoint="attention")
    slow, quick = (
        step_cost(LLAMA, setting, device(f"h100,launch_seconds={seconds}"), batch=1)
        for seconds in (2e-3, 1e-6)
    )
    hops = 1 + 7 * 0.05
    assert slow.launch_seconds == pytest.approx(32 * 3 * 2e-3 * hops)
    assert slow.seconds == slow.launch_seconds > slow.busy_seconds == quick.seconds
    assert slow.is_launch_bound and not quick.is_launch_bound
    assert slow.mfu == pytest.approx(quick.mfu * quick.seconds / slow.seconds)
    for each in (slow, quick):
        beside = ("gathering", "host_copies")
        own = [part for name, part in each.parts.items() if name not in beside]
        assert sum(own) == pytest.approx(each.seconds)
    long = replace(setting, length=131_072)
    assert not step_cost(LLAMA, long, device("h100"), batch=1).is_launch_bound


def test_programs_of_whole_steps_are_not_launched():
    setting = Setting(length=1024, checkpoint="none")
    assert step_cost(LLAMA, setting, device("v5p"), batch=1).launch_seconds == 0


def test_more_micro_steps_and_folds_are_launched_more_often():
    setting, h100 = Setting(length=8192, ring=8, checkpoint="none"), device("h100")
    one = step_cost(LLAMA, setting, h100, batch=1).launch_seconds
    assert step_cost(LLAMA, setting, h100, 3).launch_seconds == pytest.approx(3 * one)
    folded = step_cost(LLAMA, replace(setting, folds=4), h100, 1).launch_seconds
    assert folded == pytest.approx(4 * one * 3 / 2)
