"""Checkpoint -> Hugging Face folder, in one process with the memory of a piece of a tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ringspan.checkpoints.manifest import TensorEntry, read_manifest, verify
from ringspan.checkpoints.shards import Chunk, opened_shards, read_chunk
from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.files.named import read_small
from ringspan.core.messages.lines import refused
from ringspan.torch.layers.positions import as_trained, note_length
from ringspan.torch.weights.deferred import Region, deferred, shape_of
from ringspan.torch.weights.loading import auto_class
from ringspan.torch.weights.saving import plan_files, saved_names
from ringspan.torch.weights.writing import MAX_SHARD_SIZE, missing_room
from ringspan.train.data.origin import tokenizer_of
from ringspan.train.model import load_model_config
from ringspan.train.run_folder.export import put_beside, scratch_beside, write_configs
from ringspan.train.run_folder.record import RECORD, recorded

_PREFIX: Final = "model/"


def export_checkpoint(
    run: Path,
    step: int | None,
    folder: Path,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    doing: Callable[[str], None] = lambda what: None,
) -> tuple[int, int]:
    """Export a checkpoint (None: the newest) like ``<run>/model``; return its step and weight bytes."""
    if folder.exists():
        raise ConfigError(f"{folder}: is there already; give another folder, or remove it")
    config, saved = _config_of(run), _checkpoint_of(run, step)
    if config.adapter.rank is not None:
        raise ConfigError(
            f"{run}: its checkpoints hold an adapter alone; use the adapter or merged model in {run / 'model'}"
        )
    manifest = read_manifest(saved)
    for number, name in enumerate(sorted(manifest.files), start=1):
        doing(f"checking file {number} of {len(manifest.files)}")
        verify(saved, manifest, name)
    model_config = load_model_config(config)
    dtype = getattr(torch, config.model.dtype)
    with torch.device("meta"):
        auto = auto_class(model_config, sees=config.data.messages is not None)
        plain: Any = auto.from_config(model_config, trust_remote_code=config.model.trust_remote_code)
    if config.data.documents != "separate":
        note_length(plain, config.data.sequence_length_tokens, says=False)
    tensors: dict[str, Tensor] = {}
    for place, (name, aliases) in enumerate(saved_names(plain).items()):
        stored = next((_PREFIX + each for each in aliases if _PREFIX + each in manifest.tensors), None)
        if stored is None:
            raise CheckpointError(f"{saved}: has no {name}; is it of another model? use its own")
        tensors[name] = deferred(_Saved(saved, stored, manifest.tensors[stored], place))
    plan = plan_files(plain, tensors, max_shard_size=max_shard_size, dtype=dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if problem := missing_room(folder.parent, plan.num_bytes):
        raise CheckpointError(problem)
    with refused(f"{folder} was not written", OSError, error_type=CheckpointError), scratch_beside(folder) as scratch:
        with as_trained(plain):
            write_configs(scratch, plain.config, dtype)
        for number, name in enumerate(plan.files, start=1):
            doing(f"writing file {number} of {len(plan.files)}")
            plan.write(name, scratch)
        plan.write_index(scratch, plain.num_parameters())
        if tokenizer := tokenizer_of(run):
            shutil.copytree(tokenizer, scratch, dirs_exist_ok=True)
        put_beside(scratch, folder)
    return manifest.step, plan.num_bytes


def _config_of(run: Path) -> Any:
    if not (run / RECORD).exists():
        raise ConfigError(f"{run}: is no folder of a run ({RECORD} is missing)")
    with refused(f"{run / RECORD}: is not the record of a run", OSError, ValueError, KeyError, TypeError):
        return recorded(json.loads(read_small(run / RECORD))["config"])[0]


def _checkpoint_of(run: Path, step: int | None) -> Path:
    there = sorted(
        int(path.name.removeprefix("step_"))
        for path in (run / "checkpoints").glob("step_*")
        if path.name.removeprefix("step_").isdecimal()
    )
    if not there:
        raise ConfigError(f"{run}: has no checkpoint; train it first")
    chosen = there[-1] if step is None else step
    if chosen not in there:
        raise ConfigError(f"{run}: has no checkpoint of step {chosen}; there are {', '.join(map(str, there))}; use one")
    return run / "checkpoints" / f"step_{chosen:08d}"


class _Saved:
    def __init__(self, folder: Path, name: str, entry: TensorEntry, place: int) -> None:
        self.name, self.shape, self.dtype = name, entry.shape, getattr(torch, entry.dtype)
        self.place: tuple[int, int] = (place, 0)
        self._folder, self._entry = folder, entry

    def read(self, region: Region) -> Tensor:
        chunk = Chunk(tuple(each.start for each in region), torch.empty(shape_of(region), dtype=self.dtype))
        with opened_shards(self._folder) as shard:
            read_chunk(chunk, self.name, self._entry, self._folder, shard)
        return chunk.data
