"""A checkpoint's manifest, signed against changes, and its files' verification: only JSON and safetensors."""

import math
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from ringspan.core.errors import CheckpointError
from ringspan.core.files.signed import read_signed, signed, why_not_written
from ringspan.core.messages.lines import shortened

MANIFEST: Final = "manifest.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileEntry(_Record):
    bytes: NonNegativeInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Piece(_Record):
    """A rectangle of a tensor: ``tensor[offset : offset + shape]``, under the tensor's name in one file."""

    file: str
    offset: tuple[NonNegativeInt, ...] = Field(strict=False)
    shape: tuple[NonNegativeInt, ...] = Field(strict=False)


class TensorEntry(_Record):
    dtype: str
    shape: tuple[NonNegativeInt, ...] = Field(strict=False)
    pieces: tuple[Piece, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _pieces_make_it_up(self) -> "TensorEntry":
        for piece in self.pieces:
            inside = len(piece.offset) == len(piece.shape) == len(self.shape) and all(
                first + size <= whole for first, size, whole in zip(piece.offset, piece.shape, self.shape, strict=True)
            )
            if not inside:
                raise ValueError(f"a piece {piece.offset} + {piece.shape} is not inside the shape {self.shape}")
        if len({piece.offset for piece in self.pieces}) < len(self.pieces):
            raise ValueError("two pieces start at the same place")
        if sum(math.prod(piece.shape) for piece in self.pieces) != math.prod(self.shape):
            raise ValueError(f"the pieces do not make up the shape {self.shape}")
        return self


class Manifest(_Record):
    """A checkpoint: run, step, layout, each file's digest and each tensor's place."""

    format: Literal["ringspan checkpoint 1"] = "ringspan checkpoint 1"
    run_id: str
    step: NonNegativeInt
    num_ranks: int = Field(ge=1)
    mesh: dict[str, int]
    layout: str
    state: dict[str, Any]  # JSON values for resuming: data position, guard, configuration
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _files_are_known_and_inside(self) -> "Manifest":
        for name in self.files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{name!r} is not the name of a shard")
        for tensor, entry in self.tensors.items():
            for piece in entry.pieces:
                if piece.file not in self.files:
                    raise ValueError(f"{tensor} lies in {piece.file!r}, which is not among the files")
        return self

    def dump(self) -> str:
        return signed(self.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(read_signed(path, "the checkpoint was not finished: use another"))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise CheckpointError(f"{path}: {shortened(place)}: {shortened(problem['msg'])}") from error


def verify(folder: Path, manifest: Manifest, name: str) -> None:
    path, entry = folder / name, manifest.files[name]
    if problem := why_not_written(path, entry.bytes, entry.sha256):
        raise CheckpointError(f"{path}: {problem}{_origin(path, manifest)}")


def origin_of(run_id: str, step: int) -> dict[str, str]:
    """Return what a shard's header says about its save."""
    return {"run_id": run_id, "step": str(step)}


def _origin(path: Path, manifest: Manifest) -> str:
    try:
        with safe_open(path, "numpy") as shard:
            origin = shard.metadata() or {}
    except (SafetensorError, OSError, ValueError):
        return "; its content is damaged"
    if origin != origin_of(manifest.run_id, manifest.step):
        return f"; it is of step {origin.get('step', '?')} of run {origin.get('run_id', '?')}: stale"
    return "; its content is damaged"
