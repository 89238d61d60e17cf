"""Hostile files: mutated manifests, shards and configurations give typed errors or nothing; no code, no hang."""

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ringspan.checkpoints.shards import (
    MANIFEST,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    read_manifest,
    read_tensors,
    verify,
)
from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.files.signed import digest_of, file_digest
from ringspan.train.config.load import load_config
from tests.fuzz import FACTOR

# so that `make fuzz` runs them, many times as often
pytestmark = pytest.mark.hypothesis
TIMES = round(250 * FACTOR)  # of each of four kinds
SHARDS = ("rank_00000.safetensors", "rank_00001.safetensors")
# Values that have broken readers of other formats.
NASTY: list[Any] = [
    *(None, True, -1, 0, 2**63, 10**400, 1e308, "", [], {}, [[]] * 50),
    *("../../etc/passwd", "/etc/passwd", "a\0b", "\ud800"),
    *(
        "__import__('os').system('true')",
        "!!python/object/apply:os.system ['true']",
        "cos\nsystem\n(S'true'\ntR.",
    ),
    {"__class__": "Exploit", "__reduce__": ["os.system", ["true"]]},
]


def checkpoint(folder: Path) -> Manifest:
    """Two ranks' shards of a matrix, a vector and a scalar."""
    matrix, vector = torch.arange(35.0).view(7, 5), torch.arange(9).to(torch.bfloat16)
    folder.mkdir()
    parts = (
        {"matrix": matrix[:4], "vector": vector[:5], "scalar": torch.tensor(3.0)},
        {"matrix": matrix[4:], "vector": vector[5:]},
    )
    for name, tensors in zip(SHARDS, parts, strict=True):
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            folder / name,
            {"step": "1", "run_id": "r"},
        )
    rows = _piece(0, (0, 0), (4, 5)), _piece(1, (4, 0), (3, 5))
    manifest = Manifest(
        run_id="r",
        step=1,
        num_ranks=2,
        mesh={"ring": 2},
        layout="zigzag",
        state={"num_sequences": 4, "guard": {"spikes": [0.5]}},
        files={
            name: FileEntry(
                bytes=(folder / name).stat().st_size, sha256=file_digest(folder / name)
            )
            for name in SHARDS
        },
        tensors={
            "matrix": TensorEntry(dtype="float32", shape=(7, 5), pieces=rows),
            "vector": TensorEntry(
                dtype="bfloat16",
                shape=(9,),
                pieces=(_piece(0, (0,), (5,)), _piece(1, (5,), (4,))),
            ),
            "scalar": TensorEntry(
                dtype="float32", shape=(), pieces=(_piece(0, (), ()),)
            ),
        },
    )
    (folder / MANIFEST).write_text(manifest.dump())
    return manifest


def _piece(file: int, offset: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    return Piece(file=SHARDS[file], offset=offset, shape=shape)


def load(folder: Path) -> None:
    """All that a resume reads, in its order."""
    manifest = read_manifest(folder)
    for name in manifest.files:
        verify(folder, manifest, name)
    targets = {
        "matrix": torch.empty(7, 5),
        "vector": torch.empty(9, dtype=torch.bfloat16),
        "scalar": torch.empty(()),
    }
    read_tensors(folder, manifest, targets)


def mutate_bytes(content: bytes, generator: random.Random) -> bytes:
    """Flip, cut, double, insert or replace a few bytes."""
    data = bytearray(content)
    for _ in range(generator.choice((1, 1, 2, 5))):
        place, size = generator.randrange(len(data) + 1), generator.randrange(1, 9)
        match generator.randrange(5):
            case 0 if place < len(data):
                data[place] ^= 1 << generator.randrange(8)
            case 1:
                del data[place : place + generator.choice((size, 1 << 20))]
            case 2:
                data[place:place] = data[place : place + 40]
            case 3:
                data[place:place] = generator.randbytes(size)
            case _:
                data[place : place + size] = (
                    generator.choice((b"\xff", b"\0", b"[", b"{", b"9", b'"')) * size
                )
    return bytes(data)


def mutate_value(value: Any, generator: random.Random) -> Any:
    """Put something nasty in one place of nested JSON values, or take a key away."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        match generator.randrange(8):
            case 0:
                return rest
            case 1:
                return {**value, str(generator.choice(NASTY)): generator.choice(NASTY)}
            case _:
                return {**rest, key: mutate_value(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.8:
        place = generator.randrange(len(value))
        return [
            *value[:place],
            mutate_value(value[place], generator),
            *value[place + generator.randrange(2) + 0 :],
        ]
    if isinstance(value, int) and generator.random() < 0.5:
        return value + generator.choice((-1, 1, 1 << 40))
    return generator.choice(NASTY)


FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "socket.connect",
    "exec",
    "pickle.find_class",
)


@contextmanager
def watched():
    """No more than a second for one file, and no process, socket, file outside or compilation while it is read."""
    forbidden = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if armed and event in FORBIDDEN:
            forbidden.append((event, arguments))

    def too_slow(*_: object) -> None:
        raise TimeoutError("a second was not enough")

    armed = True
    sys.addaudithook(hook)  # stays for ever, hence the flag
    previous = signal.signal(signal.SIGALRM, too_slow)
    try:
        yield forbidden
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def strike(
    times: int,
    error: type[Exception],
    prepare: Callable[[random.Random], None],
    read: Callable[[], object],
) -> int:
    """How many mutations were refused; anything but the typed error fails the test.

    The file is read as it is first: Python runs a module the first time that a reader needs it, such as a codec's.
    """
    read()
    refused, generator = 0, random.Random(times)
    with watched() as forbidden:
        for _ in range(times):
            prepare(generator)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            try:
                read()
            except error as refusal:
                refused += 1
                assert "\n" not in str(refusal)
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert forbidden == []
    return refused


def test_mutated_bytes_of_a_manifest(tmp_path):
    folder = tmp_path / "step"
    checkpoint(folder)
    pristine = (folder / MANIFEST).read_bytes()
    refused = strike(
        TIMES,
        CheckpointError,
        lambda generator: (
            (folder / MANIFEST).write_bytes(mutate_bytes(pristine, generator)) and None
        ),
        lambda: load(folder),
    )
    # a mutation may leave the values as they are: white space, or a cut at the end
    assert refused > 0.95 * TIMES


def test_manifests_that_lie_with_a_right_digest(tmp_path):
    folder = tmp_path / "step"
    values = json.loads(checkpoint(folder).dump())["manifest"]

    def prepare(generator: random.Random) -> None:
        lie = mutate_value(values, generator)
        try:
            digest = digest_of(lie)
        except ValueError:
            digest = "0" * 64
        (folder / MANIFEST).write_text(json.dumps({"sha256": digest, "manifest": lie}))

    refused = strike(TIMES, CheckpointError, prepare, lambda: load(folder))
    # another step, mesh or state is a manifest like any other
    assert refused > 0.35 * TIMES


def test_mutated_shards_behind_a_right_digest(tmp_path):
    folder = tmp_path / "step"
    manifest = checkpoint(folder)
    path = folder / SHARDS[0]
    pristine = path.read_bytes()

    def prepare(generator: random.Random) -> None:
        header = 8 + int.from_bytes(pristine[:8], "little")
        cut = generator.choice((header, len(pristine)))
        path.write_bytes(mutate_bytes(pristine[:cut], generator) + pristine[cut:])
        entry = FileEntry(bytes=path.stat().st_size, sha256=file_digest(path))
        lie = manifest.model_copy(
            update={"files": {**manifest.files, SHARDS[0]: entry}}
        )
        (folder / MANIFEST).write_text(lie.dump())

    refused = strike(TIMES, CheckpointError, prepare, lambda: load(folder))
    # other values of the same shape cannot be told from the right ones by who signs them
    assert refused > 0.35 * TIMES


def test_mutated_configurations(tmp_path):
    path = tmp_path / "config.toml"
    pristine = (Path(__file__).parents[2] / "examples" / "finetune.toml").read_bytes()
    path.write_bytes(pristine)
    refused = strike(
        TIMES,
        ConfigError,
        lambda generator: path.write_bytes(mutate_bytes(pristine, generator)) and None,
        lambda: load_config(path),
    )
    assert refused > 0.35 * TIMES  # many mutations hit a comment


def test_the_watch_sees_code_that_runs(tmp_path):
    with watched() as forbidden:
        os.system("true")
        exec(compile("1", "<test>", "exec"))
    assert {event for event, _ in forbidden} == {"os.system", "exec"}
    with pytest.raises(TimeoutError), watched():
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        signal.pause()
