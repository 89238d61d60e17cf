"""What the planner chooses, and that its words are about its numbers."""

from dataclasses import replace
from itertools import product

import pytest

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.names import CHECKPOINT_NAMES, LAYOUT_NAMES
from ringspan.core.schedule import timing
from ringspan.core.schedule.choice import WORTH_IT
from ringspan.core.schedule.schedule import make_schedule
from ringspan.plan.cluster.hardware import DEVICES
from ringspan.plan.cost import loop
from ringspan.plan.cost.cost import step_cost
from ringspan.plan.cost.memory import RESERVE, attention_backward_bytes, training_memory
from ringspan.plan.cost.passes import attention_passes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import MODELS
from ringspan.plan.planner import _Race, make_plan, weighed_seconds
from ringspan.plan.search import Question, longest, meshes, policies, routes
from ringspan.plan.snippet import python_call, toml_tables
from tests.cases import long
from tests.plan.plans import windowed

LLAMA = MODELS["llama-3.1-8b"]
H100 = DEVICES["h100-80gb"]
LARGER = MODELS["llama-13b"]
ALONE = {"devices": 1, "length": 4096, "device": replace(H100, host_bandwidth=0.0)}


def plan_for(**changes):
    return make_plan(
        Question(
            **{
                "shape": LLAMA,
                "device": H100,
                "devices": 16,
                "length": 131_072,
                "batch": 1,
            }
            | changes
        )
    )


def test_a_short_sequence_gets_no_ring_and_is_told_so():
    plan = plan_for(shape=MODELS["qwen3-0.6b"], length=4096, batch=16)
    assert plan.fits and plan.setting.ring == 1 and plan.setting.replicate == 16
    assert any("fits one device" in reason for reason in plan.reasons)


def test_more_tokens_than_the_model_was_made_for_are_said():
    assert not any("was made for" in reason for reason in plan_for().reasons)
    assert any(
        "made for 131,072 positions: for 131,080" in reason
        for reason in plan_for(length=131_080).reasons
    )
    learned = plan_for(shape=MODELS["gpt2"], length=4096).reasons
    assert any("1,024 learned positions; 4,096 tokens" in reason for reason in learned)


@pytest.mark.parametrize(
    ("length", "batch"), [(8192, 1), *long((131_072, 16), (8192, 16), (1 << 20, 16))]
)
def test_no_other_fitting_setting_is_clearly_faster(length, batch):
    """Every mesh, layout, route and policy, one by one."""
    plan = plan_for(length=length, batch=batch)
    assert plan.fits

    tried = 0
    for tp, ring, layout, micro_batch in product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16), LAYOUT_NAMES, (1, 2, 4, 16)
    ):
        replicate = 16 // (tp * ring)
        if replicate == 0 or batch % (replicate * micro_batch):
            continue
        for route, checkpoint, chunk, (offload, on_host, layers) in product(
            (
                "ring",
                "bidirectional",
                "double-ring:8",
                "all-gather",
                "pass-q",
                "ulysses:2",
                "ulysses:4",
                "ulysses:8",
            ),
            CHECKPOINT_NAMES,
            (None, 1024),
            (
                ("none", False, 1),
                ("activations", False, 1),
                ("none", True, 1),
                ("none", False, 4),
            ),
        ):
            try:
                other = replace(
                    plan.setting,
                    batch=micro_batch,
                    tp=tp,
                    ring=ring,
                    replicate=replicate,
                    layout=layout,
                    route=route,
                    checkpoint=checkpoint,
                    feedforward_chunk_tokens=chunk,
                    offload=offload,
                    optimizer_on_host=on_host,
                    layers_per_checkpoint=layers,
                )
                fits = plan.question.fits(other)
            except (UnsupportedError, ConfigError):
                continue
            if fits:
                tried += 1
                cost = step_cost(LLAMA, other, H100, batch)
                assert weighed_seconds(other, cost) >= 0.999 * weighed_seconds(
                    plan.setting, plan.cost
                ), other
    assert tried > 100


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": 64, "length": 16_384},
        *long({"shape": MODELS["llama-3.1-405b"], "devices": 256}, {"length": 32_768}),
    ],
)
def test_routes_that_cannot_win_are_not_timed(monkeypatch, changes):
    attention_passes.cache_clear()
    plan = plan_for(**changes)
    few = attention_passes.cache_info().misses
    monkeypatch.setattr(_Race, "is_lost", lambda race, setting: False)
    attention_passes.cache_clear()
    assert plan_for(**changes) == plan
    assert few < 0.8 * attention_passes.cache_info().misses


def test_larger_micro_batches_if_a_sequence_waits_for_parameters():
    plan = plan_for(devices=64, length=4096, batch=256)
    assert (
        plan.setting.batch > 1
        and plan.as_json()["micro_steps"] * plan.setting.batch * plan.setting.replicate
        == 256
    )
    assert any(
        f"{plan.setting.batch} sequences per micro-step" in reason
        for reason in plan.reasons
    )
    one = step_cost(LLAMA, replace(plan.setting, batch=1), H100, 256)
    assert (
        one.seconds > 1.3 * one.compute_seconds
        and plan.cost.seconds < 1.01 * one.compute_seconds
    )
    assert plan_for(length=131_072, batch=16).setting.batch == 1


def test_a_plan_stays_within_the_device_up_to_its_longest():
    plan = plan_for()
    assert plan.memory.peak_bytes <= H100.memory_bytes
    setting = plan.longest
    assert plan.question.fits(setting)
    assert not plan.question.fits(replace(setting, length=plan.max_length_tokens + 32))
    assert longest(setting, plan.question.fits) == plan.max_length_tokens
    for route in ("ring", "all-gather", "ulysses:2"):
        for policy in policies(plan.question):
            other = replace(setting, ring=16, tp=1, route=route, **policy)
            assert longest(other, plan.question.fits) <= plan.max_length_tokens


def test_windows_stay_between_neighbours():
    all_windowed = windowed(MODELS["llama-3.2-1b"], 4096)
    assert (
        plan_for(shape=all_windowed, length=1 << 20, devices=8).setting.layout
        == "contiguous"
    )
    mixed = windowed(MODELS["llama-3.2-1b"], 4096, None)
    assert plan_for(shape=mixed, length=1 << 20, devices=8).setting.layout == "zigzag"


def test_an_impossible_budget_says_what_would_fit():
    length = 1 << 23
    plan = plan_for(devices=8, length=length)
    assert not plan.fits
    assert (
        f"the longest sequence is {plan.max_length_tokens:,} tokens" in plan.reasons[0]
    )
    enough = next(
        int(r.split(" fit on ")[1].split()[0]) for r in plan.reasons if " fit on " in r
    )
    assert plan_for(devices=enough, length=length).fits
    assert not plan_for(devices=enough // 2, length=length).fits


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (
            {"devices": 8, "length": 1 << 18, "shape": MODELS["llama-3.1-70b"]},
            "--parameter-dtype bfloat16",
        ),
        ({"shape": LARGER, "parameter_dtype": "bfloat16", **ALONE}, "--devices 2"),
        ({"shape": LARGER, **ALONE}, "--lora 16"),
    ],
)
def test_what_does_not_fit_names_the_smallest_change_that_does(changes, option):
    plan = plan_for(**changes)
    change = plan.as_json()["smallest_change"]
    assert (
        not plan.fits
        and change["option"] == option
        and change["peak_bytes"] < plan.question.device.memory_bytes
    )


def test_adapters_need_no_gradients_of_frozen_weights():
    """Of Llama 3.1 8B: seven linear layers each, 12 C + 2 D G + 3 I rows and columns; packed, half a byte each."""
    ranks, length = 4, 1 << 15
    setting, frozen = (
        Setting(length=length, ring=ranks, parameter_dtype="bfloat16"),
        LLAMA.adapted(16),
    )
    adapters = 16 * 32 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14_336))
    whole, adapted = (training_memory(shape, setting) for shape in (LLAMA, frozen))
    packed = training_memory(LLAMA.adapted(16, "nf4"), setting)
    assert frozen.trained == adapters == frozen.parameters - LLAMA.parameters
    assert adapted.bytes["parameters"] == (2 * LLAMA.parameters + 4 * adapters) // ranks
    assert adapted.bytes["optimizer"] == 8 * adapters // ranks
    linears = 32 * LLAMA.kinds[0].linears[2]
    saved = adapted.bytes["parameters"] - packed.bytes["parameters"]
    assert saved == pytest.approx((2 - 0.5625) * linears / ranks, rel=1e-6)
    # of each scale one byte, and 4 for 256
    double = training_memory(LLAMA.adapted(16, "nf4-double"), setting)
    saved = packed.bytes["parameters"] - double.bytes["parameters"]
    assert saved == pytest.approx((4 - 1 - 4 / 256) / 64 * linears / ranks, rel=1e-6)
    assert packed.peak_bytes < adapted.peak_bytes < whole.peak_bytes
    times = [
        step_cost(shape, setting, H100, 1)
        for shape in (LLAMA, frozen, LLAMA.adapted(16, "nf4"))
    ]
    assert (
        times[1].compute_seconds < times[2].compute_seconds < times[0].compute_seconds
    )
    assert (
        times[2].shard_bytes < 0.5 * times[1].shard_bytes < 0.5 * times[0].shard_bytes
    )
    assert "rank = 16" in toml_tables(plan_for(shape=frozen).question, setting)


def test_a_plan_fits_with_an_allowance_for_the_allocator_alone():
    plan = plan_for()
    dynamic = sum(
        plan.memory.bytes[name]
        for name in ("activations", "temporaries", "communication")
    )
    assert (
        plan.memory.reserve_bytes
        == plan.as_json()["reserve_bytes"]
        == round(RESERVE * dynamic)
        > 0
    )
    for memory, fits in (
        (plan.memory.needed_bytes, True),
        (plan.memory.needed_bytes - 1, False),
    ):
        assert (
            replace(plan.question, device=replace(H100, memory_bytes=memory)).fits(
                plan.setting
            )
            == fits
        )


def test_what_fits_is_never_longer_than_the_longest():
    """Where the state leaves no room, chunks and segments of layers hold more than a short sequence without them."""
    plan = plan_for(
        shape=MODELS["gpt-175b"],
        device=DEVICES["mi300x"],
        devices=8,
        length=4096,
        batch=8,
    )
    assert plan.fits and plan.setting.checkpoint == "none"
    assert plan.max_length_tokens >= 4096


def test_a_model_that_no_length_fits_says_so():
    plan = plan_for(shape=MODELS["llama-3.1-405b"], devices=4)
    assert plan.max_length_tokens == 0 and not plan.fits
    assert "no length fits; parameters and optimizer alone" in plan.reasons[0]


def test_a_given_route_is_planned_with_its_memory_and_bytes():
    around, gathered = plan_for(route="ring"), plan_for(route="all-gather")
    assert gathered.setting.route == "all-gather" and around.setting.route == "ring"
    assert gathered.longest.route == "all-gather"
    assert any("route all-gather, as asked" in reason for reason in gathered.reasons)
    alike = replace(around.setting, route="all-gather")
    assert plan_for(route="all-gather").memory == training_memory(
        LLAMA, gathered.setting
    )
    assert attention_backward_bytes(LLAMA.attention, alike) != attention_backward_bytes(
        LLAMA.attention, around.setting
    )
    with pytest.raises(UnsupportedError, match="groups of 3 do not divide 16 ranks"):
        plan_for(route="ulysses:3")


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({"shape": MODELS["gpt2-xl"], "length": 16_384}, "double-ring:8"),
        ({"shape": MODELS["gpt2-medium"], "length": 4096, "devices": 8}, "ulysses:8"),
        ({"shape": MODELS["gpt2-medium"], "length": 1 << 19, "devices": 8}, "ring"),
    ],
)
def test_another_route_is_chosen_where_the_ring_waits(changes, route):
    """Two nodes; few tokens and many heads; and blocks that hide their travel."""
    plan = plan_for(**changes)
    assert plan.setting.route == route
    assert plan.as_json()["mesh"]["ulysses"] == (8 if route == "ulysses:8" else 1)
    around = plan_for(**changes, route="ring")
    shown, other = (each.as_json()["link_bytes_per_step"] for each in (plan, around))
    if route == "ring":
        assert plan.cost == around.cost and any(
            "no other route" in reason for reason in plan.reasons
        )
        return
    assert plan.cost.busy_seconds < WORTH_IT * around.cost.busy_seconds
    assert any(
        f"route {route}, the quickest that fits" in reason for reason in plan.reasons
    )
    slower = "inter_node" if route.startswith("double") else "ring"
    assert shown[slower] < 0.7 * other[slower]


def test_tensor_parallelism_is_chosen_if_a_ring_waits():
    plan = plan_for(length=8192, devices=8)
    assert plan.setting.tp > 1 and plan.setting.ring * plan.setting.tp == 8
    reason = next(
        reason for reason in plan.reasons if reason.startswith(f"tp {plan.setting.tp}")
    )
    assert "a ring of 8 without it would need" in reason
    assert plan.as_json()["link_bytes_per_step"]["tensor_sums"] > 0
    assert all(
        mesh.tp == 1 for mesh in meshes(replace(plan.question, shape=MODELS["gpt2"]))
    )
    small_nodes = replace(plan.question, device=replace(H100, devices_per_node=4))
    assert {mesh.tp for mesh in meshes(small_nodes)} == {1, 2, 4}
    assert any(
        "no tensor parallelism was weighed" in r
        for r in plan_for(shape=MODELS["gpt2"], length=4096).reasons
    )


def test_activations_go_to_a_host_that_has_room_for_them():
    plan = plan_for(devices=8, length=1 << 21)
    assert plan.setting.offload == "activations"
    assert 0 < plan.as_json()["host_bytes"] <= H100.host_memory_bytes
    assert any("activations wait on the host" in reason for reason in plan.reasons)
    for missing in ({"host_bandwidth": 0.0}, {"host_memory_bytes": 10**9}):
        without = plan_for(devices=8, length=1 << 21, device=replace(H100, **missing))
        assert without.setting.offload == "none"


def test_moments_go_to_the_host_if_the_device_lacks_room():
    options = {"devices": 1, "length": 65_536, "parameter_dtype": "bfloat16"}
    plan = plan_for(**options)
    assert (
        plan.fits
        and plan.setting.optimizer_on_host
        and plan.memory.bytes["optimizer"] == 0
    )
    assert plan.as_json()["host_bytes"] >= 4 * LLAMA.parameters
    assert any("AdamW's moments are on the host" in reason for reason in plan.reasons)
    for missing in ({"host_bandwidth": 0.0}, {"host_memory_bytes": 10**9}):
        assert not plan_for(**options, device=replace(H100, **missing)).fits


def test_layers_share_inputs_if_these_do_not_fit():
    plan = plan_for(devices=8, length=15 << 16)
    setting = plan.setting
    assert (setting.checkpoint, setting.layers_per_checkpoint, setting.offload) == (
        "attention",
        2,
        "none",
    )
    assert any("2 layers per checkpoint" in reason for reason in plan.reasons)
    alone = replace(setting, layers_per_checkpoint=1)
    assert not plan.question.fits(alone)
    again = step_cost(plan.question.shape, alone, H100, 1)
    assert again.ring_bytes == plan.cost.ring_bytes
    assert again.seconds < plan.cost.seconds < 1.01 * again.seconds, (
        "a million tokens: attention is nearly all"
    )


def test_slow_links_are_named():
    slow = replace(H100, inter_node_bandwidth=1e8)
    assert any(
        "too slow for the block" in reason
        for reason in plan_for(device=slow, length=16_384).reasons
    )
    assert not any("too slow" in reason for reason in plan_for().reasons)


def test_the_numbers_of_the_object_that_is_printed_agree():
    shown = plan_for().as_json()
    assert shown["mesh"] == {"replicate": 1, "ring": 16, "ulysses": 1, "tp": 1}
    assert sum(shown["bytes"].values()) == shown["peak_bytes"]
    assert (
        shown["min_tokens_per_device"]["inter_node"]
        == 6 * shown["min_block_tokens"]["inter_node"]
    )
    assert 0 < shown["mfu"] < 1
    assert shown["tokens_per_second"] == pytest.approx(131_072 / shown["step_seconds"])


def test_rings_of_thousands_need_no_schedules_of_thousands(monkeypatch):
    """Where nothing fits, devices are doubled up to 16,384; the schedule of a ring of 8,192 takes gigabytes."""
    asked: list[int] = []

    def noted(layout, *args):
        asked.append(layout.ranks)
        return make_schedule(layout, *args)

    monkeypatch.setattr(loop, "make_schedule", noted)
    monkeypatch.setattr(timing, "make_schedule", noted)
    for given in ({"route": "double-ring:1024", "devices": 8192}, {"devices": 3}):
        question = Question(
            shape=MODELS["gpt-175b"],
            device=DEVICES["tpu-v3"],
            **{"length": 131_072} | given,
        )
        assert not make_plan(question).fits
    assert 64 <= max(asked) <= 512


@pytest.mark.parametrize("comm_dtype", ["bfloat16", "float8", "int8"])
def test_what_keys_are_sent_as_is_part_of_the_plan(comm_dtype):
    exact, plan = (
        plan_for(dtype="float32"),
        plan_for(dtype="float32", comm_dtype=comm_dtype),
    )
    assert plan.setting.comm_dtype == plan.as_json()["comm_dtype"] == comm_dtype
    assert plan.cost.ring_bytes < exact.cost.ring_bytes
    assert f'comm_dtype = "{comm_dtype}"' in toml_tables(plan.question, plan.setting)
    assert f'comm_dtype="{comm_dtype}",' in python_call(plan.setting)
    assert "comm_dtype" not in toml_tables(exact.question, exact.setting) + python_call(
        exact.setting
    )
    assert "pass-q" not in routes(plan.question, plan.setting)
    with pytest.raises(
        UnsupportedError, match="which stay where they are on the route pass-q"
    ):
        plan_for(route="pass-q", comm_dtype=comm_dtype)


def test_slices_of_experts_are_proposed_where_they_help():
    asked = {
        "shape": MODELS["qwen3-235b-a22b"],
        "parameter_dtype": "bfloat16",
        "devices": 16,
        "length": 131_072,
        "route": "ring",
    }
    whole, sliced = plan_for(**asked), plan_for(**asked, expert_slices="auto")
    assert not whole.fits
    assert sliced.fits
    assert whole.change == ("--expert-slices auto", sliced.memory.peak_bytes)
    longest = f"the longest sequence is {sliced.max_length_tokens:,} tokens"
    assert any(longest in reason for reason in whole.reasons)
    assert any("gathered in 3 slices" in reason for reason in sliced.reasons)
    layer = whole.as_json()["layer_gather_bytes"]
    assert any("a layer is gathered whole: " in reason for reason in whole.reasons)
    assert 0.6 * layer < sliced.as_json()["layer_gather_bytes"] < 0.7 * layer
    assert '    expert_slices="auto",' in python_call(sliced.setting)
    assert 'expert_slices = "auto"' in str(toml_tables(sliced.question, sliced.setting))


@pytest.mark.parametrize(
    ("shape", "slices", "message"),
    [
        (LLAMA, 4, "--expert-slices 4: llama-3.1-8b has no experts; leave it out"),
        (
            MODELS["gpt-oss-120b"],
            129,
            "layers have 128 experts; use 128 slices at most",
        ),
        (LLAMA, 0, 'expert_slices must be at least 1, got 0; or use "auto"'),
    ],
)
def test_slices_that_no_layer_has_are_refused(shape, slices, message):
    with pytest.raises(ConfigError, match=message):
        plan_for(shape=shape, expert_slices=slices)
