"""Checkpoints: whole or not there, what was written or refused, and the same values on any mesh."""

import json
import random
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.shards import MANIFEST, held_here, read_manifest, read_tensors
from ringspan.core.errors import CheckpointError
from ringspan.core.files.signed import digest_of

SHAPES = {
    "matrix": (7, 3),
    "short": (2, 5),
    "vector": (9,),
    "tall": (33, 2),
    "scalar": (),
}


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }
    tensors["tall"] = tensors["tall"].bfloat16()
    return tensors


def spread(
    tensors: dict[str, torch.Tensor], mesh: DeviceMesh
) -> dict[str, torch.Tensor]:
    """As FSDP2 holds them: rows over the ring, whole on each replica; a scalar is a plain tensor."""
    spread = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 0:
            spread[name] = tensor.clone()
            continue
        rows = torch.chunk(tensor, mesh["ring"].size())
        here = mesh["ring"].get_local_rank()
        local = rows[here].clone() if here < len(rows) else tensor[:0].clone()
        spread[name] = DTensor.from_local(
            local,
            mesh,
            (Replicate(), Shard(0)),
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return spread


def same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, on what this rank holds."""
    for name, tensor in tensors.items():
        for chunk in held_here(tensor):
            place = tuple(
                slice(o, o + s)
                for o, s in zip(chunk.offset, chunk.data.shape, strict=True)
            )
            if not torch.equal(chunk.data, expected[name][place]):
                return False
    return True


def opened(folder: Path, **options) -> Checkpoints:
    return Checkpoints(folder, **{"run_id": "run1", "asynchronous": False, **options})


def save(
    checkpoints: Checkpoints, mesh: DeviceMesh, step: int
) -> CheckpointError | None:
    own = {"random": torch.tensor([step, dist.get_rank()])}
    return checkpoints.save(
        step,
        spread(whole(step), mesh),
        own,
        {"loss": 0.5 * step},
        mesh={"ring": mesh["ring"].size()},
        layout="zigzag",
    )


def save_steps(mesh: DeviceMesh, folder: Path, steps: list[int]) -> None:
    checkpoints = opened(folder)
    for step in steps:
        assert save(checkpoints, mesh, step) is None
    checkpoints.close()


def load_here(mesh: DeviceMesh, folder: Path, step: int) -> bool:
    empty = spread(
        {name: torch.full_like(tensor, 7) for name, tensor in whole(0).items()}, mesh
    )
    read_tensors(folder, read_manifest(folder), empty)
    return same(empty, whole(step))


@pytest.mark.parametrize("saved_by", [1, 2, 4], ids="replicas {}".format)
def test_what_one_mesh_saves_every_other_mesh_loads_bit_for_bit(
    pool, tmp_path, saved_by
):
    pool.run(save_steps, 4, tmp_path, [3], replicate=saved_by)
    folder = tmp_path / "step_00000003"
    assert (tmp_path / "latest").read_text() == "step_00000003\n"
    for ranks, replicate in [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4)]:
        assert all(pool.run(load_here, ranks, folder, 3, replicate=replicate)), (
            ranks,
            replicate,
        )
    written = sum(entry.bytes for entry in read_manifest(folder).files.values())
    assert written == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_replicas_write_nothing_twice(pool, tmp_path):
    pool.run(save_steps, 4, tmp_path, [1], replicate=2)
    manifest = read_manifest(tmp_path / "step_00000001")
    assert {piece.file for piece in manifest.tensors["tall"].pieces} == {
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    }
    assert len(manifest.tensors["tall"].pieces) == 2


def save_and_change(mesh, folder):
    checkpoints, tensors = (
        opened(folder, asynchronous=True, keep=9),
        spread(whole(1), mesh),
    )
    for step in range(1, 6):
        assert checkpoints.save(step, tensors, {}, {}, mesh={}, layout="zigzag") is None
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
    assert checkpoints.wait() is None
    checkpoints.close()


def test_an_asynchronous_save_has_the_values_of_its_step(pool, tmp_path):
    pool.run(save_and_change, 4, tmp_path)
    expected = whole(1)
    for step in range(1, 6):
        loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        read_tensors(
            tmp_path / f"step_{step:08d}",
            read_manifest(tmp_path / f"step_{step:08d}"),
            loaded,
        )
        for name, tensor in loaded.items():
            assert torch.equal(tensor, expected[name]), (step, name)
            expected[name] = expected[name] + 1


def resume_own(mesh, folder):
    checkpoints = opened(folder)
    found = checkpoints.find()
    own = {"random": torch.zeros(2, dtype=torch.int64)}
    tensors = spread(
        {name: torch.empty_like(tensor) for name, tensor in whole(0).items()}, mesh
    )
    checkpoints.load(found.folder, found.manifest, tensors, own)
    checkpoints.close()
    return (
        same(tensors, whole(found.manifest.step)),
        own["random"].tolist(),
        found.manifest.state,
    )


def test_each_rank_gets_back_what_is_its_own(pool, tmp_path):
    pool.run(save_steps, 4, tmp_path, [2])
    results = pool.run(resume_own, 4, tmp_path)
    assert results == [(True, [2, rank], {"loss": 1.0}) for rank in range(4)]


def test_the_newest_are_kept_and_leftovers_cleaned(pool, tmp_path):
    (tmp_path / "step_00000009.tmp-run0").mkdir(parents=True)
    (tmp_path / "step_00000009.tmp-run0" / "rank_00000.safetensors").write_text("half")
    pool.run(save_steps, 4, tmp_path, [1, 2, 5, 7])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step_00000005",
        "step_00000007",
    ]


def flip(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def spoil(kind: str, folder: Path, generator: random.Random) -> str:
    """Damage a checkpoint in one way; the name of the file that must be named."""
    path = folder / f"rank_{generator.randrange(4):05d}.safetensors"
    match kind:
        case "flip":
            flip(path, generator)
        case "manifest":
            path = folder / MANIFEST
            flip(path, generator)
        case "truncate":
            path.write_bytes(path.read_bytes()[: -generator.randrange(1, 40)])
        case "extend":
            path.write_bytes(path.read_bytes() + b"\0")
        case "missing":
            path.unlink()
        case "stale":
            shutil.copy(folder.with_name("step_00000001") / path.name, path)
        case "no manifest":
            path = folder / MANIFEST
            path.unlink()
    return path.name


def find_spoilt(mesh, folder, kinds):
    """Damage the newest checkpoint again and again; how often it was refused by name and the one before offered."""
    generator, refused = random.Random(0), 0
    pristine, checkpoints = folder.with_name("pristine"), opened(folder)
    for kind in kinds:
        named = [None]
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pristine, folder)
            named = [spoil(kind, folder / "step_00000002", generator)]
        dist.broadcast_object_list(named)
        found = checkpoints.find()
        offered = found.manifest is not None and found.manifest.step == 1
        names = [line for line in found.skipped if f"step_00000002/{named[0]}" in line]
        refused += offered and len(names) == len(found.skipped) == 1
        dist.barrier()
    checkpoints.close()
    return refused, found.skipped


def test_damage_is_named_and_the_previous_checkpoint_offered(pool, tmp_path):
    folder = tmp_path / "run"
    pool.run(save_steps, 4, folder, [1, 2])
    shutil.copytree(folder, tmp_path / "pristine")
    kinds = (
        ["flip"] * 20
        + ["manifest"] * 10
        + ["truncate"] * 5
        + ["extend", "missing", "no manifest"] * 2
        + ["stale"] * 4
    )
    for refused, skipped in pool.run(find_spoilt, 4, folder, kinds):
        assert refused == len(kinds) == 45
        assert "step 1 of run run1: stale" in skipped[0]


def find_in(mesh, folder, run_id):
    checkpoints = opened(folder, run_id=run_id)
    found = checkpoints.find()
    checkpoints.close()
    return found.folder, found.skipped


def test_a_checkpoint_of_another_run_is_refused(pool, tmp_path):
    pool.run(save_steps, 4, tmp_path, [1])
    for folder, skipped in pool.run(find_in, 4, tmp_path, "run2"):
        assert folder is None and "is of run run1, expected run2" in skipped[0]


def save_on_a_full_disk(mesh, folder):
    """The last rank may write no more than 200 bytes a file; then the limit is lifted."""
    checkpoints = opened(folder)
    assert save(checkpoints, mesh, 1) is None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    failure = save(checkpoints, mesh, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, previous)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    found = checkpoints.find()
    assert found.manifest is not None
    step = found.manifest.step
    after = save(checkpoints, mesh, 3)
    checkpoints.close()
    return str(failure), left, step, after


def test_a_full_disk_spoils_nothing_and_training_can_go_on(pool, tmp_path):
    for failure, left, step, after in pool.run(save_on_a_full_disk, 4, tmp_path):
        assert "step 2 not saved: rank 3: " in failure
        assert "bytes are needed here" in failure and "are free" in failure
        assert left == ["latest", "step_00000001"] and step == 1 and after is None
    assert all(pool.run(load_here, 4, tmp_path / "step_00000003", 3))


def save_without_space(mesh, folder):
    checkpoints = opened(folder)
    huge = type("Huge", (), {"step": 1, "num_bytes": 1 << 50})()
    checkpoints._background.start("step 1", lambda: checkpoints.write(huge))
    return str(checkpoints.close())


def test_space_is_checked_before_anything_is_written(pool, tmp_path):
    for failure in pool.run(save_without_space, 4, tmp_path):
        assert (
            f"{4 * 2**50 + 2**20:,} bytes are needed" in failure
            and "are free; make room" in failure
        )
    assert list(tmp_path.iterdir()) == []


def load_wrong(mesh, folder, name, shape, dtype):
    checkpoints = opened(folder)
    found = checkpoints.find()
    # Only one rank asks for what is not there; all must hear of it.
    tensors = {name: torch.empty(shape, dtype=dtype)} if dist.get_rank() == 2 else {}
    with pytest.raises(CheckpointError) as refusal:
        checkpoints.load(found.folder, found.manifest, tensors, None)
    checkpoints.close()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("other", (7, 3), torch.float32, "has no other"),
        (
            "matrix",
            (3, 7),
            torch.float32,
            "matrix is float32 [7, 3], expected float32 [3, 7]",
        ),
        (
            "matrix",
            (7, 3),
            torch.bfloat16,
            "matrix is float32 [7, 3], expected bfloat16 [7, 3]",
        ),
    ],
)
def test_another_model_is_refused_on_all_ranks(
    pool, tmp_path, name, shape, dtype, message
):
    pool.run(save_steps, 4, tmp_path, [1])
    for refusal in pool.run(load_wrong, 4, tmp_path, name, shape, dtype):
        assert message in refusal


def test_a_manifest_that_leads_out_of_its_folder_is_refused(pool, tmp_path):
    pool.run(save_steps, 4, tmp_path, [1])
    path = tmp_path / "step_00000001" / MANIFEST
    values = json.loads(path.read_text())["manifest"]
    values["files"]["../secret.safetensors"] = values["files"].pop(
        "rank_00000.safetensors"
    )
    path.write_text(json.dumps({"sha256": digest_of(values), "manifest": values}))
    with pytest.raises(
        CheckpointError, match=r"'\.\./secret\.safetensors' is not the name of a shard"
    ):
        read_manifest(path.parent)
