"""What a host holds of a model that is loaded, trained and saved."""

from dataclasses import replace

import pytest
import torch

from ringspan.plan.cluster.devices import DEVICES
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import (
    host_bytes,
    host_use,
    local_parameter_bytes,
    local_trained_bytes,
    moment_bytes,
)
from ringspan.plan.model.configs import MODELS
from ringspan.plan.planner import Plan, make_plan
from ringspan.plan.search import Question

LLAMA, H100 = MODELS["llama-3.1-8b"], DEVICES["h100-80gb"]


def test_a_host_holds_a_weight_then_offload_then_a_shard_copy():
    setting = Setting(length=65_536, ring=8, optimizer_on_host=True)
    use = host_use(LLAMA, setting)
    assert use["load"] == 4 * LLAMA.vocab * LLAMA.hidden, (
        "the embedding is larger than a layer"
    )
    assert (
        use["train"]
        == host_bytes(LLAMA, setting)
        == 2 * local_parameter_bytes(LLAMA, setting)
    )
    assert use["save"] == use["train"] + 3 * local_parameter_bytes(LLAMA, setting)
    small = replace(LLAMA, vocab=1000)
    assert host_use(small, setting)["load"] == 4 * small.layer_parameters
    on_cpu = host_use(LLAMA, replace(setting, on_gpu=False))
    assert on_cpu["load"] == 0 and on_cpu["save"] == on_cpu["train"], (
        "where the host is the device"
    )


@pytest.mark.parametrize(
    ("package", "state"),
    [("bitsandbytes", "8bit"), ("torchao", "8bit"), ("torchao", "4bit")],
)
def test_packed_moments_are_as_large_as_those_of_an_optimizer(package, state):
    module = pytest.importorskip(f"{package}.optim")
    weight = torch.nn.Parameter(torch.ones(256, 1024))
    weight.grad = torch.ones_like(weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer = getattr(module, f"AdamW{state}")([weight])
        optimizer.step()
    parts = [
        part
        for value in optimizer.state[weight].values()
        for part in getattr(value, "__dict__", {}).values()
    ]
    tensors = [
        x
        for x in (*optimizer.state[weight].values(), *parts)
        if isinstance(x, torch.Tensor) and x.ndim
    ]
    held = sum(x.numel() * x.element_size() for x in tensors if not hasattr(x, "codes"))
    setting = Setting(length=65_536, ring=8, optimizer_state=state)
    numbers = local_trained_bytes(LLAMA, setting) / 4
    assert moment_bytes(LLAMA, setting) / numbers == pytest.approx(
        held / weight.numel(), rel=0.02
    )


def plan(host_gigabytes: float, devices: int = 8) -> Plan:
    device = replace(H100, host_memory_bytes=int(host_gigabytes * 10**9))
    return make_plan(
        Question(shape=LLAMA, device=device, devices=devices, length=65_536)
    )


def test_a_plan_is_refused_where_the_host_cannot_load_the_model():
    fine = plan(250)
    assert fine.fits and not any("the host" in reason for reason in fine.reasons)
    use = host_use(LLAMA, fine.setting)
    assert 0 < use["load"] < use["save"] < 250e9 and use["train"] == 0
    refused = plan(use["load"] / 1e9 - 0.1)
    assert not refused.fits and not refused.as_json()["fits"]
    assert any(
        reason.startswith("to load it, ") and "one weight or layer" in reason
        for reason in refused.reasons
    )
    # More devices have smaller shards, but no smaller layers.
    assert any("no number of" in reason for reason in refused.reasons)


def test_a_plan_says_that_the_host_cannot_hold_a_checkpoint():
    """The run can start, and save its model in pieces."""
    use = host_use(LLAMA, plan(250).setting)
    tight = plan(use["save"] / 1e9 - 0.1)
    assert tight.fits
    assert any(
        "cannot hold a checkpoint while it is written" in reason
        for reason in tight.reasons
    )
    assert not any(
        "cannot hold a checkpoint" in reason
        for reason in plan(use["save"] / 1e9, 16).reasons
    )


def test_an_unknown_host_is_asked_only_for_offloaded_bytes():
    assert plan(0).fits and not plan(0).setting.uses_host
