"""Rotary positions on the ring: the frequencies of the whole sequence, whatever part of it a rank holds."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.model.layers import rope
from ringspan.torch.model.layers.rope import (
    chunk_rotary_tables,
    is_rotary,
    set_global_length,
)
from tests.cases import long
from tests.torch.models import build, relative, tokens

LONG = {
    "long_factor": [3.0 + i for i in range(8)],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 16,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {"factor": 4.0, **LONG},
}


def scaled(kind: str) -> Any:
    parameters = {"rope_type": kind, "rope_theta": 1e4, **SCALINGS[kind]}
    return build(
        "llama",
        rope_parameters=parameters,
        max_position_embeddings=16 if kind == "dynamic" else 64,
    )


def logits_on_ring(mesh: DeviceMesh, layout: str, lengths: list[int]) -> Any:
    results: dict[str, list[Any]] = {}
    for kind in SCALINGS:
        model = rs.parallelize(scaled(kind), mesh, layout=layout)
        results[kind] = []
        for length in lengths:
            ids = tokens(2, length)
            split = rs.Layout(layout, length, mesh["ring"].size())
            with torch.no_grad():
                local = model(
                    **rs.shard_batch({"input_ids": ids}, mesh, layout=layout)
                ).logits
            results[kind].append(rs.unshard(local, split, mesh["ring"].get_group(), 1))
    return results


# 13: dynamic and longrope choose short frequencies, though a padded sequence of 16 would be as long as they go.
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, "zigzag"), *long((1, "zigzag"), (2, "striped"), (4, "contiguous"))],
)
def test_positions_are_exact_under_every_scaling(pool, ranks, layout):
    lengths = [13, 37, 17]
    for results in pool.run(logits_on_ring, ranks, layout, lengths):
        for kind, found in results.items():
            model = scaled(kind)
            for length, logits in zip(lengths, found, strict=True):
                with torch.no_grad():
                    assert (
                        relative(logits, model(input_ids=tokens(2, length)).logits)
                        < 1e-5
                    ), (kind, length)


def test_scalings_differ_where_they_are_tested():
    outs = [scaled(kind)(input_ids=tokens(1, 37)).logits for kind in SCALINGS]
    differences = [relative(a, b) for i, a in enumerate(outs) for b in outs[:i]]
    assert min(differences) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi"])
def test_tables_in_blocks_are_the_whole_ones(kind, monkeypatch):
    monkeypatch.setattr(rope, "_CHUNK_TOKENS", 5)
    plain, model = build(kind), build(kind)
    chunk_rotary_tables(model)
    set_global_length(model, 50)
    blockwise = [
        module for module in model.modules() if isinstance(module, rope._ChunkedTables)
    ]
    whole = [module for module in plain.modules() if is_rotary(module)]
    assert len(blockwise) == len(whole) == 1
    layer_types = (
        sorted(set(getattr(model.config, "layer_types", None) or ()))
        if kind == "gemma3_text"
        else [None]
    )
    positions = torch.randperm(50)[:23]
    for layer_type in layer_types:
        for rows in (
            positions.expand(3, -1),
            torch.stack((positions, positions.flip(0))),
        ):
            args = (
                torch.zeros(1, dtype=torch.bfloat16),
                rows.int(),
                *([layer_type] if layer_type else []),
            )
            for ours, theirs in zip(blockwise[0](*args), whole[0](*args), strict=True):
                assert torch.equal(ours, theirs) and ours.dtype == torch.bfloat16
        tables = blockwise[0](
            torch.zeros(1),
            positions.expand(3, -1),
            *([layer_type] if layer_type else []),
        )
        assert all(
            table.untyped_storage().nbytes() == table[:1].nbytes for table in tables
        ), "one row for all"
