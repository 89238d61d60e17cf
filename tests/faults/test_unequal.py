"""Ranks that were given different things, and meshes that cannot be: an error that names them, on every rank."""

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.core.errors import RingspanError
from ringspan.torch.runtime.mesh import split_world
from ringspan.torch.transport import agreement
from ringspan.train.config.load import parse_config

# What the last rank is given instead of: batch 2, 4 and 2 heads, 8 tokens, head size 16, causal, zigzag.
UNEQUAL = {
    "tokens": {"tokens": 12, "key_tokens": 12}, "batch": {"batch": 1}, "query heads": {"heads": 2},
    "key heads": {"kv_heads": 4}, "head size": {"size": 8, "value_size": 8}, "value head size": {"value_size": 8},
    "key tokens": {"key_tokens": 8, "cross": True}, "dtype": {"dtype": torch.bfloat16}, "mask": {"mask": "full"},
    "window": {"mask": "window:5"}, "documents": {"mask": "documents:10,14"}, "layout": {"layout": "striped"},
}  # fmt: skip


def attend(mesh, changes):
    """All ranks attend, the last one with something changed; the error, if there is one."""
    group = mesh["ring"].get_group()
    agreement._groups.pop(group, None)  # what another test's ranks have agreed on, these would not compare again
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def call(batch=2, heads=4, kv_heads=2, tokens=8, key_tokens=8, size=16, value_size=16, cross=False, **more):
        dtype = more.pop("dtype", torch.float32)
        shapes = (heads, tokens, size), (kv_heads, key_tokens, size), (kv_heads, key_tokens, value_size)
        q, k, v = (torch.ones(batch, *shape, dtype=dtype) for shape in shapes)
        if cross:
            more["key_layout"] = rs.Layout("zigzag", ranks * key_tokens, ranks)
        return rs.ring_attention(q, k, v, **{"layout": "zigzag", "group": group, **more})

    kind = changes.get("mask", "").partition(":")[0]
    common = {"mask": {"window": "window:7", "documents": "documents:12,12"}.get(kind, "causal")}
    if changes.get("cross"):
        common = {"mask": "full", "key_tokens": 4, "cross": True}
    try:
        call(**{**common, **(changes if rank == ranks - 1 else {})})
    except RingspanError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("what", UNEQUAL)
def test_unequal_input_is_refused_by_name_on_every_rank(pool, what):
    outcomes = pool.run(attend, 3, UNEQUAL[what])
    for kind, message in outcomes:
        assert kind == "PeerMismatch", (kind, message)
        assert "rank 0: " in message and "rank 2: " in message


WRONG_MESHES = [
    (4, {"ring": 3}, "mesh.ring = 3"), (4, {"ring": 8}, "mesh.ring = 8"), (4, {"ring": 2}, "mesh.ring = 2"),
    (4, {"ring": 2, "replicate": 3}, "needs 6 processes"), (4, {"replicate": 3}, "mesh.replicate = 3"),
    (4, {"ring": 4, "replicate": 2}, "needs 8 processes"), (3, {"replicate": 2}, "mesh.replicate = 2"),
    (1, {"ring": 2}, "needs 2 processes, but there are 1"), (64, {}, "a zigzag ring of 64 needs at least 128"),
    (4, {"ring": 0}, "mesh.ring = 0"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "mesh", "message"), WRONG_MESHES)
def test_a_wrong_mesh_is_refused_before_anything_starts(ranks, mesh, message):
    with pytest.raises(rs.ConfigError, match=message):
        config = {"model": {"path": "unused"}, "data": {"paths": "unused", "sequence_length_tokens": 60}, "mesh": mesh}
        parse_config(config).resolve_mesh(ranks)


def make_mesh(mesh, ring, replicate):
    rs.init_mesh(ring=ring, replicate=replicate)


@pytest.mark.parametrize(("ring", "replicate"), [(3, 1), (2, 1), (4, 2), (None, 3), (None, 0)])
def test_a_wrong_mesh_of_a_script_is_refused_on_every_rank(pool, ring, replicate):
    for outcome in pool.outcomes(make_mesh, 4, ring, replicate):
        assert isinstance(outcome, rs.ConfigError) and "must equal the world size 4" in str(outcome)
    assert split_world(4, None, 2) == (2, 2)


def make_odd_mesh(mesh, usual, odd):
    rs.init_mesh(**(odd if mesh.get_rank() == 3 else usual))


@pytest.mark.parametrize(
    ("usual", "odd", "message"),
    [
        ({"ring": 4}, {"ring": 2, "replicate": 2}, "ring is 4 on rank 0, 2 on rank 3"),
        ({"ring": 2, "tp": 2}, {"ring": 2, "replicate": 2}, "replicate is 1 on rank 0, 2 on rank 3"),
        ({}, {"ring": 2, "replicate": 2}, "ring is 4 on rank 0, 2 on rank 3"),
        ({"ring": 4}, {"ring": 3}, "ring is 4 on rank 0, 3 on rank 3"),  # which alone cannot be
    ],
)
def test_ranks_that_ask_for_different_meshes_raise(pool, usual, odd, message):
    for outcome in pool.outcomes(make_odd_mesh, 4, usual, odd):
        assert isinstance(outcome, rs.PeerMismatch) and message in str(outcome)
