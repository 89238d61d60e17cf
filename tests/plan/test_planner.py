"""What the planner chooses, and that its words are about its numbers."""

from dataclasses import replace

import pytest

from ringspan.core.errors import ConfigError
from ringspan.plan.cost import step_cost
from ringspan.plan.hardware import DEVICES
from ringspan.plan.memory import CHECKPOINTS, Setting, longest, training_memory
from ringspan.plan.planner import Question, make_plan
from ringspan.plan.shapes import MODELS

LLAMA = MODELS["llama-3.1-8b"]
H100 = DEVICES["h100-80gb"]


def plan_for(**changes):
    return make_plan(
        Question(**{"shape": LLAMA, "device": H100, "devices": 16, "length": 131_072, "batch": 1} | changes)
    )


def test_a_short_sequence_gets_no_ring_and_is_told_so():
    plan = plan_for(shape=MODELS["qwen3-0.6b"], length=4096, batch=16)
    assert plan.fits and plan.setting.ring == 1 and plan.setting.replicate == 16
    assert any("fits one device" in reason for reason in plan.reasons)


@pytest.mark.parametrize("length", [8192, 131_072, 1 << 20])
def test_no_other_ring_or_policy_that_fits_is_faster(length):
    plan = plan_for(length=length, batch=16)
    assert plan.fits
    for ring in (1, 2, 4, 8, 16):
        for checkpoint in CHECKPOINTS:
            other = replace(plan.setting, ring=ring, replicate=16 // ring, checkpoint=checkpoint)
            if training_memory(LLAMA, other).peak_bytes <= H100.memory_bytes:
                assert step_cost(LLAMA, other, H100, 16).seconds >= 0.999 * plan.cost.seconds


def test_a_fitting_plan_stays_within_the_device_and_a_longer_one_than_its_longest_does_not():
    plan = plan_for()
    assert plan.memory.peak_bytes <= H100.memory_bytes
    setting = Setting(length=plan.max_length_tokens, ring=16, checkpoint="full")
    assert training_memory(LLAMA, setting).peak_bytes <= H100.memory_bytes
    longer = replace(setting, length=plan.max_length_tokens + 32)
    assert training_memory(LLAMA, longer).peak_bytes > H100.memory_bytes
    assert longest(LLAMA, setting, H100.memory_bytes) == plan.max_length_tokens


def test_windows_stay_between_neighbours():
    windowed = replace(MODELS["llama-3.2-1b"], windows=(4096,) * 16)
    assert plan_for(shape=windowed, length=1 << 20, devices=8).setting.layout == "contiguous"
    mixed = replace(MODELS["llama-3.2-1b"], windows=(4096, None) * 8)
    assert plan_for(shape=mixed, length=1 << 20, devices=8).setting.layout == "zigzag"


def test_an_impossible_budget_says_what_would_fit():
    plan = plan_for(devices=8, length=1 << 21)
    assert not plan.fits
    assert f"the longest sequence is {plan.max_length_tokens:,} tokens" in plan.reasons[0]
    enough = next(int(r.split(" fit on ")[1].split()[0]) for r in plan.reasons if " fit on " in r)
    assert plan_for(devices=enough, length=1 << 21).fits
    assert not plan_for(devices=enough // 2, length=1 << 21).fits


def test_a_model_that_no_length_fits_says_so():
    plan = plan_for(shape=MODELS["llama-3.1-405b"], devices=4)
    assert plan.max_length_tokens == 0 and not plan.fits
    assert "no length fits; parameters and optimizer alone" in plan.reasons[0]


def test_slow_links_are_named():
    slow = replace(H100, inter_node_bandwidth=1e8)
    assert any("too slow for the block" in reason for reason in plan_for(device=slow, length=16_384).reasons)
    assert not any("too slow" in reason for reason in plan_for().reasons)


def test_the_object_that_is_printed_has_the_documented_keys():
    shown = plan_for().as_json()
    documented = {
        "fits", "peak_bytes", "bytes", "mesh", "layout", "route", "checkpoint", "max_length_tokens", "min_block_tokens",
        "min_tokens_per_device", "step_seconds", "mfu", "tokens_per_second", "flops_per_step", "reasons",
    }  # fmt: skip
    assert documented <= set(shown)
    assert shown["mesh"] == {"replicate": 1, "ring": 16, "ulysses": 1}
    assert sum(shown["bytes"].values()) == shown["peak_bytes"]
    assert shown["min_tokens_per_device"]["inter_node"] == 6 * shown["min_block_tokens"]["inter_node"]
    assert 0 < shown["mfu"] < 1
    assert shown["tokens_per_second"] == pytest.approx(131_072 / shown["step_seconds"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "--devices 0"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"length": 8, "devices": 16}, "cannot be shared"),
    ],
)
def test_bad_questions_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_for(**changes)
