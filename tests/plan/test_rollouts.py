"""An engine next to the trainer: what its GPUs hold, how many are needed, and how long weights take to it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.cli.commands.plan import EPILOG
from ringspan.core.errors import RingspanError
from ringspan.core.messages.units import shown_bytes
from ringspan.plan.cluster.devices import DEVICES
from ringspan.plan.cluster.hardware import device
from ringspan.plan.model.configs import MODELS
from ringspan.plan.rollouts import TAKEN, plan_rollouts
from ringspan.plan.search import Question
from tests.cli.test_bad_input import printed
from tests.fuzz import examples
from tests.surface import check_object

LLAMA = MODELS["llama-3.1-8b"]
# 8 heads of keys and values with 128 numbers each, in 32 layers, in bfloat16
A_TOKEN = 2 * 8 * 128 * 32 * 2


def question(kind="h100", **more):
    given = {"shape": LLAMA, "devices": 8, "length": 32_768} | more
    return Question(device=device(kind), **given)


@pytest.mark.parametrize(
    ("devices", "kind", "tensor", "share"),
    [
        (1, "h100", 1, 1.0),
        (6, "h100", 2, 1 / 6),
        (8, "h100", 8, 1 / 8),
        (16, "h100", 8, 1 / 16),
        (16, "h100,devices_per_node=16", 16, 1 / 8),  # a GPU has a head at least
    ],
)
def test_an_engine_holds_weights_and_cache(devices, kind, tensor, share):
    engine = plan_rollouts(question(kind), devices).engine
    assert (engine.tensor, engine.pipeline) == (tensor, devices // tensor)
    assert engine.weight_bytes == math.ceil(2 * LLAMA.parameters / devices)
    left = int(TAKEN * 80e9) - engine.weight_bytes
    assert engine.cache_bytes == left
    assert engine.cache_tokens == pytest.approx(left / (A_TOKEN * share), abs=1)


def test_a_window_leaves_room_for_more_tokens():
    """Layers with a window cache its last tokens alone, so tokens are those of the length that is asked for."""
    short, long = (
        plan_rollouts(
            question(shape=MODELS["gemma-3-12b"], length=length), 1
        ).engine.cache_tokens
        for length in (1024, 65_536)
    )
    assert long > 4 * short


@pytest.mark.parametrize(
    ("devices", "link", "speed"),
    [(8, "inter_node", 50e9), (4, "intra_node", 450e9), (5, "inter_node", 50e9)],
)
def test_whole_weights_take_the_link_that_joins_both(devices, link, speed):
    asked = question(devices=4, parameter_dtype="bfloat16")
    found = plan_rollouts(asked, devices)
    assert found.link == link and found.adapter_bytes == 0
    assert found.handed_bytes == 2 * LLAMA.parameters
    assert found.seconds(found.handed_bytes) == found.handed_bytes / speed
    wide = plan_rollouts(replace(asked, parameter_dtype="float32"), devices)
    assert wide.handed_bytes == 2 * found.handed_bytes


@pytest.mark.parametrize("weights", ["", "nf4"])
def test_an_adapter_is_handed_over_merged_or_alone(weights):
    adapted = LLAMA.adapted(16, weights)
    found = plan_rollouts(question(shape=adapted), 8)
    plain = plan_rollouts(question(), 8)
    assert found.handed_bytes == plain.handed_bytes == 4 * LLAMA.parameters
    assert found.engine.weight_bytes == plain.engine.weight_bytes
    assert found.adapter_bytes == 4 * (adapted.parameters - LLAMA.parameters)


@examples(60)
@given(
    st.sampled_from(
        [shape for shape in MODELS.values() if not (shape.has_states or shape.sees)]
    ),
    st.sampled_from(list(DEVICES.values())),
    st.one_of(st.integers(1, 600), st.integers(1, 1 << 20)),
    st.integers(1, 1 << 20),
    st.sampled_from(("bfloat16", "float32")),
)
def test_any_engine_fits_or_says_how_many_do(shape, kind, devices, length, dtype):
    asked = Question(shape=shape, device=kind, devices=8, length=length, dtype=dtype)
    try:
        engine = plan_rollouts(asked, devices).engine
    except RingspanError as error:
        line = str(error)
        assert line.startswith(f"--rollouts {devices}: ") and "\n" not in line
        if "no number of these" in line:
            return
        count = int(line.rpartition(" ")[2])
        assert count != devices and plan_rollouts(asked, count)
        if "give at least" in line and count > 1:
            with pytest.raises(RingspanError):
                plan_rollouts(asked, count - 1)
        return
    assert engine.tensor * engine.pipeline == devices
    assert engine.tensor <= kind.devices_per_node
    assert engine.pipeline <= shape.layers
    assert 0 < engine.weight_bytes < engine.usable_bytes < kind.memory_bytes
    assert engine.weight_bytes + engine.cache_bytes == engine.usable_bytes
    assert engine.cache_tokens >= length


def test_the_command_says_what_the_object_does(monkeypatch, capsys):
    asking = ("plan", "--length", "32768", "--lora", "16", "--rollouts", "4")
    monkeypatch.setenv("COLUMNS", "80")
    result = json.loads(printed(monkeypatch, capsys, *asking, "--json"))
    check_object("plan --rollouts", result)
    found = result["rollouts"]
    assert found["devices"] == found["tensor_parallel"] == 4
    assert found["hand_over_seconds"] == found["handed_bytes"] / 50e9
    assert found["sequences"] == found["cache_tokens"] // 32_768
    lines = printed(monkeypatch, capsys, *asking).splitlines()
    shown = lines[lines.index("with rollouts") :]
    assert max(map(len, shown)) <= 80
    told = dict(line.strip().split("  ", 1) for line in shown[1:])
    told = {name: value.strip() for name, value in told.items()}
    needs = shown_bytes(result["peak_bytes"] + result["reserve_bytes"])
    assert told == {
        "trainer": f"8 x NVIDIA H100 80 GB, each {needs} of 80.0 GB",
        "engine": "4 x NVIDIA H100 80 GB, each 4.02 GB of weights in bfloat16",
        "left for cache": f"69.6 GB each, {found['cache_tokens']:,} tokens in all",
        "at once": f"{found['sequences']:,} sequences of 32,768 tokens",
        "hand-over": "32.1 GB in 642 ms between nodes, at least",
        "adapter only": "168 MB in 3.36 ms between nodes",
        "start it with": "vllm serve --tensor-parallel-size 4",
    }


def test_it_is_printed_after_why_not_too(monkeypatch, capsys):
    asking = ("plan", "--rollouts", "64", "--why-not", "ulysses")
    text = printed(monkeypatch, capsys, *asking)
    assert text.startswith("ulysses: ") and "\nwith rollouts\n" in text
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 8" in text


def test_the_page_shows_what_is_printed(monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")
    example = EPILOG.split("ringspan plan ")[2].rstrip(". ").split()
    assert f"ringspan plan {' '.join(example)}" in text
    now = printed(monkeypatch, capsys, "plan", *example)
    shown = now[now.index("with rollouts") :].split()
    assert " ".join(shown) in " ".join(text.split())
