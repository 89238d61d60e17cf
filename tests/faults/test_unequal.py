"""Meshes that cannot be, and different ones: an error that names them, on every rank."""

import pytest

import ringspan as rs
from ringspan.torch.runtime.mesh import split_world
from ringspan.train.config.load import parse_config

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
        config = {
            "model": {"path": "unused"},
            "data": {"paths": "unused", "sequence_length_tokens": 60},
            "mesh": mesh,
        }
        parse_config(config).resolve_mesh(ranks)


def make_mesh(mesh, ring, replicate):
    rs.init_mesh(ring=ring, replicate=replicate)


@pytest.mark.parametrize(
    ("ring", "replicate"), [(3, 1), (2, 1), (4, 2), (None, 3), (None, 0)]
)
def test_a_wrong_mesh_of_a_script_is_refused_on_every_rank(pool, ring, replicate):
    for outcome in pool.outcomes(make_mesh, 4, ring, replicate):
        assert isinstance(
            outcome, rs.ConfigError
        ) and "must equal the world size 4" in str(outcome)
    assert split_world(4, None, 2) == (2, 2)


def make_odd_mesh(mesh, usual, odd):
    rs.init_mesh(**(odd if mesh.get_rank() == 3 else usual))


@pytest.mark.parametrize(
    ("usual", "odd", "message"),
    [
        ({"ring": 4}, {"ring": 2, "replicate": 2}, "ring is 4 on rank 0, 2 on rank 3"),
        (
            {"ring": 2, "tp": 2},
            {"ring": 2, "replicate": 2},
            "replicate is 1 on rank 0, 2 on rank 3",
        ),
        ({}, {"ring": 2, "replicate": 2}, "ring is 4 on rank 0, 2 on rank 3"),
        # which alone cannot be
        (
            {"ring": 4},
            {"ring": 3},
            "ring is 4 on rank 0, 3 on rank 3",
        ),
    ],
)
def test_ranks_that_ask_for_different_meshes_raise(pool, usual, odd, message):
    for outcome in pool.outcomes(make_odd_mesh, 4, usual, odd):
        assert isinstance(outcome, rs.PeerMismatch) and message in str(outcome)
