"""What a host holds of a model that is loaded, trained and saved."""

from dataclasses import replace

from ringspan.plan.cluster.devices import DEVICES
from ringspan.plan.cost.memory import host_bytes, host_use, local_parameter_bytes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.shapes import MODELS
from ringspan.plan.planner import make_plan
from ringspan.plan.search import Question

LLAMA, H100 = MODELS["llama-3.1-8b"], DEVICES["h100-80gb"]


def test_a_host_holds_one_weight_then_what_waits_there_then_a_copy_of_the_shards():
    setting = Setting(length=65_536, ring=8, optimizer_on_host=True)
    use = host_use(LLAMA, setting)
    assert use["load"] == 4 * LLAMA.vocab * LLAMA.hidden, "the embedding is larger than a layer"
    assert use["train"] == host_bytes(LLAMA, setting) == 2 * local_parameter_bytes(LLAMA, setting)
    assert use["save"] == use["train"] + 3 * local_parameter_bytes(LLAMA, setting)
    small = replace(LLAMA, vocab=1000)
    assert host_use(small, setting)["load"] == 4 * small.layer_parameters
    assert set(host_use(LLAMA, replace(setting, on_gpu=False)).values()) == {0}


def plan(host_gigabytes: int) -> tuple[str, ...]:
    device = replace(H100, host_memory_bytes=host_gigabytes * 10**9)
    return make_plan(Question(shape=LLAMA, device=device, devices=8, length=65_536)).reasons


def test_a_plan_says_what_the_host_cannot_hold():
    assert not any("the host cannot" in reason for reason in plan(250))
    assert any("cannot hold a checkpoint while it is written" in reason for reason in plan(8))
    assert any("the host cannot load it" in reason for reason in plan(1))
