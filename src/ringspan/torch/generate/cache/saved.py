"""Saved caches: each rank's share as safetensors and a signed manifest, loadable onto any number of ranks."""

# B batch, G key/value heads of a rank, M tokens of a rank, D head size, L tokens of the whole sequence.

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import torch.distributed as dist
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import CheckpointError, UnsupportedError
from ringspan.core.files.disk import sync_file, sync_folder, write_synced
from ringspan.core.files.named import why_no_folder
from ringspan.core.files.signed import (
    digest_of,
    file_digest,
    read_signed,
    signed,
    why_not_written,
)
from ringspan.core.geometry.shares import Runs, runs_from
from ringspan.core.messages.lines import one_line, refused, shortened
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.generate.cache.cache import RingCache, RingLayer
from ringspan.torch.generate.cache.identity import config_of, reader_of, weights_digest
from ringspan.torch.mechanisms.media.kinds import has_grid_positions, is_of
from ringspan.torch.model.config_changes import deciding_fields
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.memory.sharding import settle
from ringspan.torch.model.weights.files import opened_files
from ringspan.torch.runtime.dtypes import dtype_named

MANIFEST: Final = "manifest.json"
_PARTS: Final = "keys", "values", "index"

_Run = Annotated[tuple[NonNegativeInt, PositiveInt], Field(strict=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SavedLayer(_Record):
    first: NonNegativeInt
    heads: PositiveInt
    """Key/value heads of the whole model."""
    sizes: tuple[PositiveInt, PositiveInt] = Field(strict=False)
    dtype: str
    index: tuple[PositiveInt, str] | None = Field(default=None, strict=False)
    """Size and dtype of the keys of its index, if it has one."""

    @property
    def parts(self) -> dict[str, tuple[int, str]]:
        sizes = [(size, self.dtype) for size in self.sizes]
        return dict(
            zip(_PARTS, [*sizes, self.index] if self.index else sizes, strict=False)
        )


class SavedShare(_Record):
    """File of one rank: each layer's keys, values and index keys at ``runs`` from its first position on."""

    file: str = Field(pattern=r"^rank_\d+\.safetensors$")
    bytes: NonNegativeInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tp: NonNegativeInt
    runs: tuple[_Run, ...] = Field(strict=False)


class SavedCache(_Record):
    format: Literal["ringspan cache 1"] = "ringspan cache 1"
    model: str
    config: dict[str, Any]
    weights_sha256: str
    length: PositiveInt
    sequences: PositiveInt
    ids_sha256: str
    tp: PositiveInt
    layers: tuple[SavedLayer, ...] = Field(strict=False)
    shares: tuple[SavedShare, ...] = Field(strict=False)


def save(model: Any, cache: Any, folder: str | Path) -> None:
    """Write a cache into a new folder, on every rank; raise as ``RingGenerator.save_cache``."""
    target = Path(folder)
    scratch = target.with_name(f"{target.name}.tmp-new")
    _vote(model, "save_cache", target, lambda: _facts_to_save(model, cache, target))
    settle(model)
    weights = weights_digest(model)
    mesh = model.ring_mesh
    tp = _axis(mesh, "tp")
    is_writer = mesh.get_local_rank("replicate") == 0
    is_first = not any(mesh.get_coordinate() or ())
    _vote(
        model,
        "save_cache: make the folder",
        target,
        lambda: _make(scratch) if is_first else None,
    )
    written: list[SavedShare] = []
    _vote(
        model,
        "save_cache: write",
        target,
        lambda: (
            written.append(_write(scratch, cache, cache.rank * tp[1] + tp[0], tp[0]))
            if is_writer
            else None
        ),
    )
    written = [share for part in gather_over(mesh, written) for share in part]
    saved = SavedCache(
        model=class_name(model),
        config=config_of(model),
        weights_sha256=weights,
        length=cache.shares.length,
        sequences=cache.num_sequences,
        ids_sha256=_ids_digest(cache.ids),
        tp=tp[1],
        layers=tuple(_saved_layer(layer, tp[1]) for layer in cache.keepers),
        shares=tuple(written),
    )
    _vote(
        model,
        "save_cache: finish",
        target,
        lambda: _finish(scratch, target, saved) if is_first else None,
    )


def load(model: RingModel, folder: str | Path, cache: RingCache) -> RingCache:
    """Fill an empty cache, each rank with its part; CheckpointError on every rank for another model's cache."""
    source = Path(folder)
    manifests: list[SavedCache] = []
    _vote(model, "load_cache", source, lambda: _check(model, source, manifests))
    (saved,) = manifests
    settle(model)
    if weights_digest(model) != saved.weights_sha256:
        raise CheckpointError(
            f"{source}: was written by a {saved.model} with other weights; read the tokens again"
        )
    _vote(model, "load_cache: read", source, lambda: _fill(model, source, saved, cache))
    return cache


def _vote(
    model: RingModel, name: str, folder: Path, work: Callable[[], dict[str, Any] | None]
) -> None:
    with meeting(model.ring_mesh, name) as facts:
        try:
            facts.alike = work() or {}
        except (CheckpointError, UnsupportedError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{folder}: {type(error).__name__}: {one_line(error)}"
            ) from error


def _axis(mesh: DeviceMesh, name: str) -> tuple[int, int]:
    return (
        (mesh.get_local_rank(name), mesh.get_group(name).size())
        if name in (mesh.mesh_dim_names or ())
        else (0, 1)
    )


def _facts_to_save(model: Any, cache: Any, target: Path) -> dict[str, Any]:
    """Return what all ranks must agree on to save a cache: the model, the folder's name and the tokens.

    UnsupportedError for a cache that is not this model's, is empty or incomplete, was read by other weights, or holds
    more than keys and values; CheckpointError for a folder that exists or cannot be written.
    """
    if not isinstance(cache, RingCache):
        raise UnsupportedError(
            f"a {type(cache).__name__} cannot be saved; use a cache from model.new_cache()"
        )
    if (cache.shares.ranks, len(cache.layers)) != (
        model.ring_axis.size(),
        len(model.new_cache().layers),
    ):
        raise UnsupportedError(
            f"the cache is for {cache.shares.ranks} ranks and {len(cache.layers)} layers; use this model's new_cache()"
        )
    if not cache.shares.length or cache.num_sequences is None:
        raise UnsupportedError(
            "the cache is empty; generate with past_key_values=cache first"
        )
    cache.check_complete()
    cache.read_by(reader_of(model))
    refuse_unsaved(model, cache)
    if target.exists():
        raise CheckpointError(f"{target}: exists; remove it, or choose another name")
    if reason := why_no_folder(target):
        raise CheckpointError(f"{target}: cannot be written: {reason}")
    return {
        "model": model.ring_number,
        "folder": target.name,
        "tokens": _ids_digest(cache.ids),
    }


def refuse_unsaved(model: Any, cache: RingCache) -> None:
    """Raise UnsupportedError for a cache with more than keys and values of tokens: states, or pools of an index.

    Pools of an index are known once the cache has read a token.
    """
    if cache.stateful:
        raise UnsupportedError(
            f"a cache with states of {class_name(model)} is not saved; read the text again"
        )
    is_shared = any(
        layer not in cache.keepers and len(layer.rows) > 2 for layer in cache.layers
    )
    if is_shared or any(layer.kept for layer in cache.layers):
        what = (
            "layers have an index and the keys of others"
            if is_shared
            else "index chooses pools"
        )
        raise UnsupportedError(
            f"a cache of {class_name(model)} whose {what} is not saved; read the text again"
        )


def _make(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)


def _write(folder: Path, cache: RingCache, number: int, tp: int) -> SavedShare:
    """Write this rank's rows of every layer into one file, file 0 with the tokens too; return its manifest entry.

    ``number``: of the file, ring rank * tp + tp rank.
    """
    path = folder / f"rank_{number:05d}.safetensors"
    tensors = {
        f"{index}.{part}": rows.tensor.cpu().contiguous()
        for index, layer in enumerate(cache.keepers)
        for part, rows in zip(_PARTS, layer.rows, strict=False)
    }
    if number == 0:
        tensors |= {"ids": cache.ids.contiguous(), "shifts": cache.shifts.contiguous()}
    save_file(tensors, path)
    sync_file(path)
    return SavedShare(
        file=path.name,
        bytes=path.stat().st_size,
        sha256=file_digest(path),
        tp=tp,
        runs=cache.shares.runs()[cache.rank],
    )


def _saved_layer(layer: RingLayer, tp: int) -> SavedLayer:
    heads = layer.rows[0].tensor.shape[1] * tp
    keys, values, *index = [
        (x.shape[-1], str(x.dtype).removeprefix("torch."))
        for x in (r.tensor for r in layer.rows)
    ]
    return SavedLayer(
        first=layer.first,
        heads=heads,
        sizes=(keys[0], values[0]),
        dtype=keys[1],
        index=index[0] if index else None,
    )


def _finish(scratch: Path, target: Path, saved: SavedCache) -> None:
    write_synced(scratch / MANIFEST, signed(saved.model_dump(mode="json")))
    sync_folder(scratch)
    scratch.rename(target)
    sync_folder(target.parent)


def _check(
    model: RingModel, folder: Path, manifests: list[SavedCache]
) -> dict[str, Any]:
    """Append the folder's manifest to ``manifests``; return what all ranks must agree on to load it.

    CheckpointError if the cache is of another model or config, or if a file is damaged. Hashing the files is shared
    out: of N ranks, rank r checks files r, r + N, ...
    """
    path = folder / MANIFEST
    values = read_signed(path, "not a cache that was saved to its end: save it again")
    try:
        saved = SavedCache.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise CheckpointError(
            f"{path}: {shortened(place)}: {shortened(problem['msg'])}"
        ) from error
    mine, theirs = config_of(model), deciding_fields(saved.config)
    if class_name(model) != saved.model:
        raise CheckpointError(
            f"{folder}: is the cache of a {saved.model}, must be of a {class_name(model)}"
        )
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{folder}: is the cache of a {saved.model} with {name}={shortened(str(theirs.get(name)))}, "
                f"not {shortened(str(mine.get(name)))}; load it with that model"
            )
    mesh = model.ring_mesh
    number = mesh.mesh.flatten().tolist().index(dist.get_rank())
    for share in saved.shares[number :: mesh.size()]:
        if problem := why_not_written(folder / share.file, share.bytes, share.sha256):
            raise CheckpointError(
                f"{folder / share.file}: {problem}; its content is damaged; save it again"
            )
    manifests.append(saved)
    return {"model": model.ring_number, "cache": digest_of(values)}


def _fill(model: RingModel, folder: Path, saved: SavedCache, cache: RingCache) -> None:
    """Read this rank's tokens and heads from the files into the cache's layers.

    Tokens are split for this ring, whichever ring saved them, so that a rank reads parts of several files. A text too
    short for every rank to have its chunks is dealt out in blocks, as new tokens are.
    """
    ranks, tp = cache.shares.ranks, _axis(model.ring_mesh, "tp")
    cache.read_by(reader_of(model))
    if saved.length >= 2 * ranks:
        cache.shares.split(saved.length)
    else:
        cache.shares.deal(saved.length)
    device = next(iter(model.get_input_embeddings().parameters())).device
    runs = cache.shares.runs()[cache.rank]
    kinds = SafetensorError, ValueError, KeyError, IndexError
    with (
        opened_files(folder) as opened,
        refused(f"{folder}: cannot be read", *kinds, error_type=CheckpointError),
    ):
        _fill_ids(model, folder, opened(saved.shares[0].file), cache)
        for index, (layer, entry) in enumerate(
            zip(cache.keepers, saved.layers, strict=True)
        ):
            count = entry.heads // tp[1]
            heads = slice(tp[0] * count, (tp[0] + 1) * count)
            held = tuple(runs_from(runs, entry.first))
            parts = [
                _gathered(opened, saved, entry, (index, part), held, heads).to(device)
                for part in entry.parts
            ]
            layer.fill(parts, saved.length, entry.first)
    if _ids_digest(cache.ids) != saved.ids_sha256:
        raise CheckpointError(
            f"{folder}: its tokens are not those that it says it holds; save it again"
        )


def _fill_ids(
    model: RingModel, folder: Path, file: safe_open, cache: RingCache
) -> None:
    """Store a saved cache's tokens and shifts; CheckpointError if old files lack images' shifts."""
    ids = file.get_tensor("ids")
    shifts = file.get_tensor("shifts") if "shifts" in file.keys() else None  # noqa: SIM118 (a file, not a dict)
    kinds = model.ring_media.modalities if has_grid_positions(model) else ()
    if shifts is None and any(
        bool(is_of(model, modality, ids).any()) for modality in kinds
    ):
        raise CheckpointError(
            f"{folder}: has images, and was saved by an earlier version, which kept no positions of the text behind "
            "them; read the tokens again"
        )
    cache.keep_ids(ids, shifts)


def _gathered(
    opened: Callable[[str], Any],
    saved: SavedCache,
    entry: SavedLayer,
    which: tuple[int, str],
    held: Runs,
    heads: slice,
) -> Tensor:
    """Return this rank's rows (B, G, M, D) of a layer's keys, values or index keys, put together from all files.

    ``which``: the layer's number and the part's name. ``held``: runs (start, count) of this rank's tokens, counted from
    the layer's first. ``heads``: this rank's, among the whole model's. CheckpointError if the files lack any of them.
    """
    name, (size, dtype) = f"{which[0]}.{which[1]}", entry.parts[which[1]]
    num_tokens = sum(count for _, count in held)
    result = torch.empty(
        saved.sequences,
        heads.stop - heads.start,
        num_tokens,
        size,
        dtype=dtype_named(dtype),
    )
    found = 0
    for share in saved.shares:
        count = entry.heads // saved.tp
        low, high = (
            max(heads.start, share.tp * count),
            min(heads.stop, (share.tp + 1) * count),
        )
        if low >= high:
            continue
        for here, there, length in _meetings(
            held, tuple(runs_from(share.runs, entry.first))
        ):
            stored = opened(share.file).get_slice(name)
            part = stored[
                :,
                low - share.tp * count : high - share.tp * count,
                there : there + length,
            ]
            result[:, low - heads.start : high - heads.start, here : here + length] = (
                part
            )
            found += (high - low) * length
    if found != (heads.stop - heads.start) * num_tokens:
        raise CheckpointError(f"the shares do not make up {name}")
    return result


def _meetings(one: Runs, other: Runs) -> Iterator[tuple[int, int, int]]:
    here = 0
    for start, count in one:
        there = 0
        for begin, size in other:
            low, high = max(start, begin), min(start + count, begin + size)
            if low < high:
                yield here + low - start, there + low - begin, high - low
            there += size
        here += count


def _ids_digest(ids: Tensor) -> str:
    return hashlib.sha256(
        f"{tuple(ids.shape)} ".encode() + ids.contiguous().numpy().tobytes()
    ).hexdigest()
