"""Models with states and convolutions as the planner counts them: parameters, FLOPs, and what a real pass sends."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import ringspan as rs
from ringspan.core.errors import RingspanError, UnsupportedError
from ringspan.core.recurrence.spans import links_of, places_of, scan_rounds
from ringspan.core.recurrence.traffic import state_messages
from ringspan.core.schedule import events, steps
from ringspan.core.schedule.schedule import make_schedule
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cluster.hardware import DEVICES
from ringspan.plan.cost.cost import model_flops, step_cost
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.states import state_bytes
from ringspan.plan.model.configs import model_shape
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.search import Question
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.layers.decoder import layers_of
from tests.cases import few
from tests.core.recurrence.cases import sent_states
from tests.every_model.hybrids import HYBRIDS, hybrid_config
from tests.every_model.tiny import tiny_config
from tests.torch.engine.recurrence.layers import LAYERS, inputs
from tests.torch.engine.recurrence.models import build

PLANNED = [*HYBRIDS]
# Beside them one each with experts, latent keys, windows, shared keys, and layers that run several times.
OTHERS = ["mixtral", "deepseek_v3", "gemma3_text", "gemma4_text", "hrm_text"]


def shape_of(folder: Any, config: Any) -> ModelShape:
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return model_shape(str(folder))


@pytest.mark.parametrize(
    "kind", [*few([each for each in PLANNED if each != "zamba"], 6), *few(OTHERS, 2)]
)
def test_parameters_and_products_are_those_of_the_model(tmp_path, kind):
    config = tiny_config(kind)
    shape, tokens = shape_of(tmp_path, config), 24
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("eager")  # products that the counter knows
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    counts = counter.get_flop_counts()["Global"]
    assert (shape.parameters, shape.layers) == (
        model.num_parameters(),
        len(layers_of(model)),
    )
    convolved = sum(kind.channels * kind.taps for kind in shape.kinds)
    products = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    assert products == 2 * tokens * (shape.matrix_parameters - convolved)


@pytest.mark.parametrize("kind", ["jetmoe", "xmod"])
def test_a_model_whose_code_asks_for_values_is_refused_by_name(tmp_path, kind):
    with pytest.raises(
        UnsupportedError, match=f"the planner cannot run {kind} without values"
    ):
        shape_of(tmp_path, tiny_config(kind))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gated delta rule", "qwen3_next"), ("lightning attention", "minimax")],
)
def test_the_flops_of_a_state_are_those_of_its_function(tmp_path, name, kind):
    shape = shape_of(tmp_path, hybrid_config(kind, **_square(kind)))
    scan = next(each.scan for each in shape.kinds if each.scan)
    arguments = inputs(name, 1, 128, heads=4, size=8)
    arguments["value"] = arguments["value"][..., :8]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        LAYERS[name].rule.run(LAYERS[name].of(torch.float32), arguments, None)
    # a triangular system, which is no product
    solved = 4 * 64 * (8 + 8) if kind == "qwen3_next" else 0
    assert counter.get_total_flops() == 128 * (scan.flops - solved)


def _square(kind: str) -> dict[str, Any]:
    return {"linear_value_head_dim": 8} if kind == "qwen3_next" else {}


def test_the_flops_of_a_state_space_are_those_of_its_function(tmp_path):
    shape = shape_of(tmp_path, hybrid_config("mamba2", n_groups=8))
    scan = next(each.scan for each in shape.kinds if each.scan)
    assert scan
    arguments = inputs("mamba-2", 1, 64, heads=8, size=8)
    for name in "BC":
        arguments[name] = torch.randn(1, 64, 8, 6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        LAYERS["mamba-2"].rule.run(LAYERS["mamba-2"].of(torch.float32), arguments, None)
    # the states of all chunks from those before, which kernels make one after the other
    chunks = 64 // 8 + 1
    assert counter.get_total_flops() == 64 * scan.flops + 2 * chunks**2 * scan.state


def sent_in_a_step(
    mesh: Any, kind: str, layout: str, length: int, checkpoint: str
) -> int:
    """Bytes that this rank sends to others in forward and backward, without those of collectives."""
    model = rs.parallelize(
        build(kind, torch.float32), mesh, layout=layout, checkpoint=checkpoint
    )
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, layout=layout)
    before = COUNTERS.sent_bytes
    model(**batch).loss.backward()
    return COUNTERS.sent_bytes - before


def attention_bytes(shape: ModelShape, layout: rs.Layout, rank: int) -> int:
    """What the ring's own events send for one layer."""
    schedule = make_schedule(layout, rs.causal(), rank, layout, "ring")
    kind = shape.attention
    latent_dim = Setting(length=layout.length, ring=layout.ranks).latent_dim(kind)
    sizes = Shape(
        1, kind.heads, kind.kv_heads, kind.head_dim, kind.value_dim, 4, latent_dim
    )
    part = steps.Part(schedule, sizes)
    posts = [
        event for each in (events.forward, events.backward) for event in each(part)
    ]
    return sum(
        size.num_bytes
        for post in posts
        if isinstance(post, steps.Post)
        for _, size in post.sends
    )


CASES = [(3, "zigzag", 61), (4, "contiguous", 64), (2, "zigzag", 40)]


@pytest.mark.parametrize(("number", "kind"), few([*enumerate(PLANNED)], 8))
def test_what_a_pass_sends_is_predicted_to_the_byte(pool, tmp_path, number, kind):
    shape = shape_of(tmp_path, hybrid_config(kind))
    ranks, layout, length = CASES[number % len(CASES)]
    split = rs.Layout(layout, length, ranks)
    states = [
        sum(rows)
        for rows in zip(
            *(state_bytes(split, each, 4) for each in shape.kinds), strict=True
        )
    ]
    attending = sum(each.attends for each in shape.kinds)
    expected = [
        states[rank] + attending * attention_bytes(shape, split, rank)
        for rank in range(ranks)
    ]
    assert (
        pool.run(sent_in_a_step, ranks, kind, layout, length, "attention") == expected
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("zigzag", 6), ("contiguous", 16), ("zigzag", 16), ("zigzag", 1)],
)
def test_messages_of_many_spans_carry_maps(layout, ranks, reverse):
    split = rs.Layout(layout, 64 * ranks, ranks)
    places = places_of(split)
    links = links_of(places, ((0,),))
    owners = [place.rank for place in places]
    rounds = scan_rounds(links.reverse if reverse else links)
    sent = sum(each.numbers for each in state_messages(split, 1, 1, reverse=reverse))
    assert sent == sent_states(rounds, owners[::-1] if reverse else owners)


def test_states_cost_the_same_at_any_length_unlike_attention(tmp_path):
    shape = shape_of(tmp_path, hybrid_config("qwen3_next"))
    sent = [
        [
            state_bytes(rs.Layout("zigzag", length, 4), kind, 2)
            for kind in shape.kinds
            if kind.scan
        ]
        for length in (4096, 65_536)
    ]
    assert sent[0] == sent[1]
    lone = shape_of(tmp_path, hybrid_config("mamba2"))
    short, double, quadruple = (
        model_flops(lone, length) for length in (4096, 8192, 16_384)
    )
    assert double == 2 * short and quadruple == 2 * double
    mixed = [model_flops(shape, length) for length in (4096, 8192)]
    assert mixed[1] > 2 * mixed[0]


def test_a_state_is_computed_once_more_each_way_where_it_travels(tmp_path):
    """On several ranks; on one, checkpointing computes it again in backward."""
    shape, device = shape_of(tmp_path, hybrid_config("mamba2")), DEVICES["h100-80gb"]
    fast = rs_fast(device)
    one, four = (
        step_cost(
            shape,
            Setting(length=1 << 16, ring=ring, layout=layout, checkpoint="none"),
            fast,
            1,
        ).compute_seconds
        for ring, layout in ((1, "contiguous"), (4, "zigzag"))
    )
    scanned = (
        (1 << 16)
        * sum(kind.scan_flops for kind in shape.kinds)
        / (fast.flops * fast.attention_efficiency)
    )
    assert 4 * four - one == pytest.approx(2 * scanned, rel=1e-6)


def rs_fast(device: Any) -> Any:
    from dataclasses import replace

    return replace(device, intra_node_bandwidth=1e18, inter_node_bandwidth=1e18)


def test_memory_grows_with_the_policy_and_falls_with_the_ring(tmp_path):
    shape = shape_of(
        tmp_path, hybrid_config("qwen3_next", num_hidden_layers=8, layer_types=None)
    )
    plain = Setting(length=1 << 15, ring=4)
    peaks = [
        training_memory(
            shape, Setting(length=1 << 15, ring=4, checkpoint=policy)
        ).peak_bytes
        for policy in ("full", "attention", "none")
    ]
    assert all(less < more for less, more in pairwise(peaks))
    longer = training_memory(shape, Setting(length=1 << 15, ring=8)).bytes[
        "activations"
    ]
    assert longer < 0.6 * training_memory(shape, plain).bytes["activations"]


def test_what_is_planned_for_attention_alone_is_refused(tmp_path):
    from ringspan.plan.documents import compare_layouts
    from ringspan.plan.generation.planner import TextQuestion

    shape, device = shape_of(tmp_path, hybrid_config("lfm2")), DEVICES["h100-80gb"]
    question = Question(shape=shape, device=device, devices=2, length=64)
    for ask in (
        lambda: TextQuestion(
            shape=shape, device=device, devices=2, prompt=8, new_tokens=8
        ),
        lambda: compare_layouts(question, Setting(length=64, ring=2), (32, 32)),
        lambda: shape.split(2),
    ):
        with pytest.raises(RingspanError, match=shape.name):
            ask()
