"""Every two mechanisms: those that go together train as on one process, the others are refused by every rank."""

from collections.abc import Callable
from itertools import combinations
from typing import Any, Final

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.mechanisms import (
    CHOSEN_KEYS,
    CONFLICTS,
    FOLDS,
    MEDIA,
    NAMES,
    ROUTES,
    STATES,
    TREES,
    refuse_pairs,
)
from ringspan.torch.mechanisms.every import MECHANISMS
from tests.combinations.judging import judge
from tests.combinations.tables import read, settled
from tests.torch.mechanisms.media.models import batch_of, build, one_process
from tests.torch.mechanisms.media.test_training import MANY, VIDEOS, close, ring_step
from tests.torch.mechanisms.routes.cases import answered
from tests.torch.mechanisms.routes.cases import check as check_routes


def drawn(line: str, kind: str) -> Callable[[Any], None]:
    """Run a line of tests/combinations, of which ``kind`` must come."""

    def run(pool: Any) -> None:
        outcome = judge(pool, settled(read(line), pool.size))
        assert outcome.kind == kind, outcome.said

    return run


def seen(kind: str, examples: Any, bound: float = 1e-9, **options: Any) -> Any:
    """Train a step of a model that sees, by its name in tests/torch/mechanisms/media."""
    dtype = options.get("dtype", torch.float64)

    def run(pool: Any) -> None:
        expected = one_process(kind, batch_of(kind, examples, dtype=dtype), dtype)
        for found in pool.run(ring_step, 2, kind, [examples], "zigzag", options):
            close(found, expected, bound)

    return run


def routed(kind: str, **options: Any) -> Callable[[Any], None]:
    """Train a step with given routes, of a model in tests/torch/mechanisms/routes."""

    def run(pool: Any) -> None:
        check_routes(pool, kind, "rows", 2, options)

    return run


def seen_on_routes(pool: Any) -> None:
    """Train a step with given routes of a model that sees, whose experts know no float64."""
    kind, dtype = "qwen3_vl_moe", torch.float32
    batch = batch_of(kind, MANY, dtype=dtype)
    shape = (*batch["input_ids"].shape, 2, 3)
    random = torch.Generator().manual_seed(3)
    routes = torch.rand(shape, generator=random).topk(2).indices
    with answered([0, 1], 3, routes):
        expected = one_process(kind, batch, dtype)
    options = {"routes": routes, "dtype": dtype}
    for found in pool.run(ring_step, 2, kind, [MANY], "zigzag", options):
        close(found, expected, 1e-5)


def in_folds(mesh: DeviceMesh) -> str:
    with pytest.raises(rs.UnsupportedError) as raised:
        rs.parallelize(build("llava"), mesh, folds=2, route="ring")
    return str(raised.value)


def of_a_tree(mesh: DeviceMesh) -> str:
    tree = {"segment_lengths": torch.tensor([4]), "segment_parents": torch.tensor([-1])}
    tokens = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    with pytest.raises(rs.UnsupportedError) as raised:
        rs.shard_batch(tokens | tree | {"pixel_values": torch.zeros(1, 3)}, mesh)
    return str(raised.value)


def of_a_routed_tree(mesh: DeviceMesh) -> str:
    tree = {"segment_lengths": torch.tensor([4]), "segment_parents": torch.tensor([-1])}
    tokens = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    routes = torch.zeros(1, 4, 2, 2, dtype=torch.int64)
    with pytest.raises(rs.UnsupportedError) as raised:
        rs.shard_batch(tokens | tree | {"routes": routes}, mesh)
    return str(raised.value)


def refused(call: Callable[[DeviceMesh], str], remedy: str) -> Callable[[Any], None]:
    def run(pool: Any) -> None:
        assert all(remedy in said for said in pool.run(call, 2))

    return run


TOGETHER: Final[dict[tuple[str, str], list[Callable[[Any], None]]]] = {
    (CHOSEN_KEYS, STATES): [
        drawn("family=qwen4_exp_text; data=packed", "equal"),
        drawn("family=qwen4_exp_text; inside=generation", "equal"),
    ],
    (CHOSEN_KEYS, MEDIA): [seen("llava-indexed", MANY)],
    # Their states are not computed in float64.
    (STATES, MEDIA): [seen("qwen3_5", VIDEOS, 1e-5, dtype=torch.float32)],
    (STATES, FOLDS): [
        drawn("family=qwen3_next; folds=2", "equal"),
        drawn("family=falcon_h1; folds=3; data=packed; checkpoint=full", "equal"),
    ],
    (CHOSEN_KEYS, ROUTES): [routed("glm_moe_dsa")],
    (STATES, ROUTES): [routed("qwen3_next")],
    (MEDIA, ROUTES): [seen_on_routes],
    (FOLDS, ROUTES): [routed("qwen3_moe", folds=2, layout="contiguous")],
    (STATES, TREES): [drawn("family=qwen3_next; data=tree", "equal")],
}
APART: Final[dict[tuple[str, str], list[Callable[[Any], None]]]] = {
    (CHOSEN_KEYS, FOLDS): [drawn("family=deepseek_v32; folds=2", "refused")],
    (CHOSEN_KEYS, TREES): [drawn("family=deepseek_v32; data=tree", "refused")],
    (MEDIA, FOLDS): [refused(in_folds, "use folds=1")],
    (MEDIA, TREES): [refused(of_a_tree, "give it separate rows")],
    (FOLDS, TREES): [drawn("data=tree; folds=2", "refused")],
    (TREES, ROUTES): [refused(of_a_routed_tree, "give it separate rows")],
}


def test_every_pair_is_tried():
    assert {each.name for each in MECHANISMS} == set(NAMES)
    assert {*TOGETHER, *APART} == {*combinations(NAMES, 2)}
    assert {frozenset(pair) for pair in APART} == {*CONFLICTS}


@pytest.mark.parametrize(
    ("pair", "number"),
    [
        pytest.param(pair, number, marks=pytest.mark.long if number else ())
        for pair, runs in TOGETHER.items()
        for number in range(len(runs))
    ],
)
def test_mechanisms_that_go_together_train_as_on_one_process(pool, pair, number):
    TOGETHER[pair][number](pool)


@pytest.mark.parametrize("pair", APART)
def test_mechanisms_that_do_not_are_refused_with_a_remedy(pool, pair):
    for run in APART[pair]:
        run(pool)


@pytest.mark.parametrize("pair", APART)
def test_a_refusal_names_both_and_why(pair):
    found = dict.fromkeys(NAMES, "") | {name: f"<{name}>" for name in pair}
    with pytest.raises(rs.UnsupportedError) as raised:
        refuse_pairs(found, "Model")
    said = str(raised.value)
    assert all(f"<{name}>" in said for name in pair)
    assert CONFLICTS[frozenset(pair)].remedy in said
