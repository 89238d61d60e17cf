"""Memory that is counted against formulas."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.costs import saved_bytes
from ringspan.core.schedule.choice import num_inputs
from ringspan.measure.trace.tracker import held_activations
from ringspan.torch.model.memory import offload
from ringspan.torch.model.memory.checkpointing import choose_checkpoint, layer_sizes
from tests.cases import long
from tests.torch.models import build, config, tokens

LENGTH = 64


def a_layer_saves(
    config: Any, policy: Any, dtype: torch.dtype, *, feedforward_in_chunks: bool = False
) -> int:
    return saved_bytes(
        layer_sizes(config),
        dtype.itemsize,
        policy,
        feedforward_in_chunks=feedforward_in_chunks,
    )


def held(mesh: DeviceMesh, dtype: torch.dtype, options: dict[str, Any]) -> list[int]:
    """Bytes that models of two and of three layers keep."""
    offload.MIN_BYTES = 0
    counts = []
    for layers in (2, 3):
        model = rs.parallelize(
            build("llama", num_hidden_layers=layers).to(dtype), mesh, **options
        )
        ids = tokens(1, LENGTH)
        counts.append(
            held_activations(
                model, rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
            )
        )
    return counts


CASES: list[dict[str, Any]] = [
    {"checkpoint": "none"},
    {"checkpoint": "none", "feedforward_chunk_tokens": 16},
    {"checkpoint": "attention"},
    {"checkpoint": "full"},
]


@pytest.mark.parametrize("dtype", [*long(torch.float32), torch.bfloat16])
@pytest.mark.parametrize(
    "options", CASES, ids=lambda options: "-".join(map(str, options.values()))
)
def test_a_layer_keeps_what_the_formula_says(pool, dtype, options):
    [[two, three]] = pool.run(held, 1, dtype, options)
    chunked = "feedforward_chunk_tokens" in options
    expected = a_layer_saves(
        config("llama"), options["checkpoint"], dtype, feedforward_in_chunks=chunked
    )
    assert abs((three - two) / LENGTH / expected - 1) < 0.05


def test_offloaded_layers_keep_nothing(pool):
    [[two, three]] = pool.run(
        held, 1, torch.float32, {"checkpoint": "attention", "offload": "activations"}
    )
    assert three - two < 0.05 * LENGTH * a_layer_saves(
        config("llama"), "attention", torch.float32
    )


def test_auto_takes_what_computes_least_again_and_fits():
    model = config("llama")
    needed = {
        policy: 100
        * model.num_hidden_layers
        * a_layer_saves(model, policy, torch.float32)
        for policy in ("none", "attention", "full")
    }
    assert needed["none"] > needed["attention"] > needed["full"]
    for policy, bytes_ in needed.items():
        assert choose_checkpoint(model, 100, bytes_, torch.float32) == (policy, 1)
        with_two = choose_checkpoint(
            model, 100, bytes_, torch.float32, layers_per_checkpoint=2
        )
        assert with_two == (policy, 1 if policy == "none" else 2)
    with pytest.raises(rs.ConfigError, match="larger ring"):
        choose_checkpoint(model, 100, 999, torch.float32)


def test_auto_shares_inputs_before_it_reruns_the_ring():
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
        a_layer, an_input = (
            a_layer_saves(model, step[0], torch.float32),
            4 * model.hidden_size,
        )
        budget = 100 * (32 * (a_layer - an_input) + inputs * an_input) - 1
    assert ladder == [
        ("none", 1),
        *((policy, n) for policy in ("attention", "full") for n in (1, 2, 4)),
    ]
