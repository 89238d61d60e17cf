"""A mesh that somebody else made trains, scores and generates as ours do, over its own groups; time-outs of groups."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringspan as rs
from ringspan.core.mesh_axes import assigned, recognised
from ringspan.torch.runtime import mesh as meshes
from ringspan.torch.runtime.foreign_mesh import ring_mesh
from ringspan.torch.runtime.mesh import timeout_seconds
from tests.cases import few
from tests.pool import TIMEOUT_SECONDS
from tests.torch.models import build, close_by_name, relative, tokens, whole_gradients

IDS = tokens(4, 21)


def step(mesh: DeviceMesh, replicas: int) -> dict[str, Any]:
    """A step on each replica's part of the batch, and whatever else takes a mesh or asks a model for its own."""
    model = rs.parallelize(build("llama"), mesh)
    batch_size = len(IDS) // replicas
    dataset = [{"input_ids": row, "labels": row} for row in IDS]
    [batch] = list(rs.loader(dataset, mesh, batch_size=batch_size))
    rows = list(rs.sampler(dataset, mesh))
    assert torch.equal(batch["input_ids"], IDS[rows])
    part = rs.shard_batch(batch, mesh)
    loss = model(**part).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with torch.no_grad():
        logprobs = rs.token_logprobs(model, part)
    answer = model.generate(
        input_ids=batch["input_ids"][:1], max_new_tokens=3, do_sample=False
    )
    gradients = whole_gradients(model)
    found = {
        "loss": loss.detach(),
        "norm": float(norm),
        "rows": rows,
        "logprobs": logprobs,
        "answer": answer,
    }
    return found | {"gradients": gradients}


def one_process() -> dict[str, Any]:
    model = build("llama")
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    logprobs = (
        out.logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0].detach()
    )
    answers: list[Tensor] = [
        model.generate(input_ids=row[None], max_new_tokens=3, do_sample=False)
        for row in IDS
    ]
    found = {
        "loss": out.loss.detach(),
        "norm": norm,
        "logprobs": logprobs,
        "answers": answers,
    }
    return found | {"gradients": gradients}


def foreign_step(
    _: DeviceMesh,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    given: Any,
    replicas: int,
) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if given:
        mesh = rs.map_mesh(mesh, **given)
    return step(mesh, replicas)


FOREIGN = [
    # shape, names, what map_mesh is given, replicas
    # torchtitan
    (
        (1, 2, 1, 2, 1),
        ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        None,
        2,
    ),
    ((2, 2), ("dp_replicate", "cp"), None, 2),
    # accelerate; a ring of one
    (
        (2, 1, 1, 1, 2),
        ("dp_replicate", "dp_shard", "cp", "sp", "tp"),
        None,
        2,
    ),
    # neighbours on the ring are not neighbours
    (
        (2, 2),
        ("cp", "dp_replicate"),
        None,
        2,
    ),
    ((2, 2), ("sp", "tp"), None, 1),
    ((4,), ("cp",), None, 1),
    ((2, 2), ("tensor", "context"), {"ring": "context", "tp": "tensor"}, 1),
    ((2, 2), ("a", "b"), {"ring": ("a", "b")}, 1),
    (
        (2, 2),
        ("dp_replicate", "dp_shard"),
        {"ring": None, "replicate": ("dp_replicate", "dp_shard")},
        4,
    ),
]


@pytest.mark.parametrize(("shape", "names", "given", "replicas"), few(FOREIGN, 5))
def test_a_step_on_a_foreign_mesh_equals_one_process(
    pool, shape, names, given, replicas
):
    truth = one_process()
    seen = set()
    for result in pool.run(foreign_step, 4, shape, names, given, replicas):
        seen.add(tuple(result["rows"]))
        assert relative(result["loss"], truth["loss"]) < 1e-5
        assert abs(result["norm"] / truth["norm"] - 1) < 1e-5
        assert (
            relative(
                result["logprobs"][:, : IDS.shape[1] - 1],
                truth["logprobs"][result["rows"]],
            )
            < 1e-5
        )
        assert torch.equal(result["answer"], truth["answers"][result["rows"][0]])
        close_by_name(result["gradients"], truth["gradients"])
    assert sorted(row for rows in seen for row in rows) == [0, 1, 2, 3], (
        "replicas see all examples, once"
    )


def mapped_twice(_: DeviceMesh) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "cp"))
    first = ring_mesh(mesh)
    ours = ring_mesh(first)
    return (
        first is ring_mesh(mesh),
        ours is first,
        first["ring"].get_group().group_name == mesh.get_group("cp").group_name,
    )


def test_a_mesh_is_mapped_once_and_keeps_its_groups(pool):
    assert pool.run(mapped_twice, 4) == [(True, True, True)] * 4


def part_of_a_mesh(_: DeviceMesh) -> Any:
    """Two pipeline stages, of which each has a model of its own, and only one a mesh of two axes in one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    mine = mesh["cp"]
    if mesh.get_local_rank("pp") == 0:
        return None
    model = rs.parallelize(build("llama"), mine)
    part = rs.shard_batch({"input_ids": IDS, "labels": IDS}, mine)
    return model(**part).loss.detach()


def test_a_part_of_a_mesh_needs_its_own_ranks_alone(pool):
    none, again, loss, same = pool.run(part_of_a_mesh, 4)
    assert none is again is None
    assert torch.equal(loss, same) and relative(loss, one_process()["loss"]) < 1e-5


def refused(_: DeviceMesh) -> list[str]:
    """Return the refusals of a mesh that would split weights twice, and of an unknown axis."""
    said = []
    for name in ("dp_shard", "pp"):
        with pytest.raises(rs.ConfigError) as caught:
            rs.parallelize(
                build("llama"),
                init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, "cp")),
            )
        said.append(str(caught.value))
    return said


def test_axes_without_a_place_are_refused_by_name(pool):
    for shard, unknown in pool.run(refused, 4):
        assert (
            "the mesh has dp_shard = 2, and weights are split over the ring alone"
            in shard
        )
        assert (
            "no role is known for pp (2); say which axis is what with map_mesh"
            in unknown
        )


@pytest.mark.parametrize(
    ("sizes", "given", "message"),
    [
        ({"ep": 2, "cp": 2}, None, r"no role is known for ep \(2\)"),
        ({"fsdp": 4}, None, r"no role is known for fsdp \(4\)"),
        (
            {"cp": 2, "sp": 2},
            None,
            "the mesh splits sequences twice, over cp and sp; use one of them",
        ),
        (
            {"a": 2, "b": 2},
            {"ring": "c"},
            "the mesh has no axis 'c'; its axes are a, b",
        ),
        ({"a": 2, "b": 2}, {"ring": "a", "tp": "a"}, "the axis 'a' is given twice"),
        (
            {"a": 2, "b": 2},
            {"ring": "a", "tp": None},
            r"b \(2\) has no role; name it as ring or tp",
        ),
    ],
)
def test_roles_that_axes_cannot_have_are_refused(sizes, given, message):
    with pytest.raises(rs.ConfigError, match=message):
        assigned(sizes, given) if given else recognised(sizes)


def descending(_: DeviceMesh, ranks: Any, names: tuple[str, ...]) -> list[str]:
    mesh, said = DeviceMesh("cpu", ranks, mesh_dim_names=names), []
    batch = {"input_ids": IDS, "labels": IDS}
    for call in (
        lambda: rs.parallelize(build("llama"), mesh),
        lambda: rs.shard_batch(batch, mesh),
        lambda: rs.map_mesh(mesh, replicate=names[0], ring=names[1]),
        lambda: list(rs.sampler([0] * 8, mesh)),
    ):
        with pytest.raises(rs.ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("ranks", "names", "message"),
    [
        ([[3, 1, 2, 0]], ("replicate", "ring"), "[3, 1, 2, 0] along its axis 'ring'"),
        ([[0, 1], [3, 2]], ("dp_replicate", "cp"), "[3, 2] along its axis 'cp'"),
        ([[2, 3], [0, 1]], ("replicate", "ring"), "[2, 0] along its axis 'replicate'"),
    ],
)
def test_ranks_ordered_unlike_their_process_groups_are_refused(
    pool, ranks, names, message
):
    """A place on such a mesh is none in its groups: each rank would take the tokens of another one."""
    for said in pool.run(descending, 4, ranks, names):
        assert all(message in text for text in said), said


def test_roles_of_names():
    sizes = {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "sp": 3, "tp": 1}
    found = {
        "replicate": ("dp_replicate",),
        "shard": ("dp_shard",),
        "ring": ("sp",),
        "tp": ("tp",),
    }
    assert recognised(sizes) == found
    assert recognised({}) == {"replicate": (), "shard": (), "ring": (), "tp": ()}
    assert assigned({"a": 2, "b": 2, "c": 1}, {"x": ("b", "a"), "y": None}) == {
        "x": ("a", "b"),
        "y": (),
    }


def seconds(mesh):
    """Of the world, and of each axis; of the weights' ranks too where these are split by two axes."""
    groups = [
        *mesh.get_all_groups(),
        *([mesh["ring_tp"].get_group()] if "tp" in mesh.mesh_dim_names else []),
    ]
    return [
        timeout_seconds(group, torch.device("cpu"))
        for group in (dist.group.WORLD, *groups)
    ]


@pytest.mark.parametrize(("replicate", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_groups_of_a_mesh_have_the_time_out_of_the_world(pool, replicate, tp):
    for found in pool.run(seconds, 4, replicate=replicate, tp=tp):
        assert len(found) == (3 if tp == 1 else 5) and set(found) == {
            0.6 * TIMEOUT_SECONDS
        }


def without_options(mesh):
    """The ring's time-out after a change that a back end does not allow."""
    device, group = torch.device("cpu"), mesh["ring"].get_group()
    before = timeout_seconds(group, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            meshes,
            "timeout_seconds",
            lambda *_: group._get_backend(torch.device("meta")),
        )
        meshes.take_timeout(mesh)
    return timeout_seconds(group, device) == before


def test_a_back_end_that_has_no_time_out_is_left_alone(pool):
    assert pool.run(without_options, 2) == [True, True]
