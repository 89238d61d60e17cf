"""A run's result, or one of its checkpoints: a Hugging Face folder, complete or absent."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ringspan.checkpoints.checkpoint import saved_steps
from ringspan.checkpoints.shards import (
    Chunk,
    TensorEntry,
    read_chunk,
    read_manifest,
    verify,
)
from ringspan.core.errors import CheckpointError, ConfigError
from ringspan.core.files.named import ADAPTER_CONFIG, read_small
from ringspan.core.messages.lines import one_line, refused
from ringspan.generate.folder import (
    load_config,
    load_model,
    load_tokenizer,
    tokenizer_folder,
)
from ringspan.generate.settings import GenerateSettings
from ringspan.torch.model.adapters import adapter_weights, base_of, is_peft
from ringspan.torch.model.layers.positions import as_trained, note_length
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.saving import voted
from ringspan.torch.model.weights.deferred import Region, deferred, shape_of
from ringspan.torch.model.weights.files import opened_files
from ringspan.torch.model.weights.loading import auto_class
from ringspan.torch.model.weights.shards import saved_names
from ringspan.torch.model.weights.writing import (
    MAX_SHARD_SIZE,
    WeightsPlan,
    missing_room,
    plan_files,
    plan_weights,
    write_weights,
)
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.train.adapter import plan_merged, write_adapter
from ringspan.train.config.tables import TrainConfig
from ringspan.train.model import Tokenizer, load_model_config
from ringspan.train.run_folder.record import RECORD, recorded
from ringspan.train.run_folder.resume import tokenizer_of


def save_model(
    model: Any,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype,
    *,
    merge: bool = False,
) -> str | None:
    """Write weights, config and tokenizer into ``folder``; return an error's text on every rank; collective.

    An adapter is written itself, or merged into the weights tensor by tensor. Rank 0 writes the pieces that ranks send
    into a temporary folder, which then replaces ``folder``.
    """
    try:
        if is_peft(model) and not merge:
            _save_adapter(model, tokenizer, folder, dtype)
        else:
            _save_whole(model, tokenizer, folder, dtype, merge=is_peft(model))
    except CheckpointError as error:
        return str(error)
    return None


def _save_whole(
    model: Any, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype, *, merge: bool
) -> None:
    """Write all weights, merged with the adapter if ``merge``, by rank 0 in three steps that all ranks vote on.

    Begin checks the room and writes configs, then the weights are sent and written, and finish puts the folder in
    place.
    """
    is_writer, base = dist.get_rank() == 0, base_of(model) if merge else model
    with as_trained(base):
        config = type(base.config).from_dict(base.config.to_dict())
    if merge:
        plan = plan_merged(model, config, dtype)
    else:
        plan = plan_weights(
            model, model.ring_mesh, max_shard_size=MAX_SHARD_SIZE, dtype=dtype
        )
    with ExitStack() as stack:
        scratch: list[Path] = []

        def begin() -> None:
            if problem := missing_room(folder.parent, plan.num_bytes):
                raise CheckpointError(problem)
            scratch.append(stack.enter_context(scratch_beside(folder)))
            write_configs(scratch[0], config, dtype)

        def finish() -> None:
            beside = (
                sum(p.numel() for p in base.parameters() if p.requires_grad)
                if merge
                else 0
            )
            plan.write_index(scratch[0], base.num_parameters() - beside)
            tokenizer.save_pretrained(scratch[0])
            put_beside(scratch[0], folder)

        _together(model, begin if is_writer else None)
        write_weights(
            plan,
            scratch[0] if is_writer else None,
            lambda _, error: _together(model, error),
        )
        _together(model, finish if is_writer else None)


def _save_adapter(
    model: Any, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype
) -> None:
    is_writer = dist.get_rank() == 0

    def begin() -> None:
        if problem := missing_room(
            folder.parent, model_bytes(model, dtype, is_adapter=True)
        ):
            raise CheckpointError(problem)

    def write() -> None:
        with scratch_beside(folder) as scratch:
            write_adapter(model, weights, scratch)
            tokenizer.save_pretrained(scratch)
            put_beside(scratch, folder)

    _together(model, begin if is_writer else None)
    weights = adapter_weights(model, {})
    _together(model, write if is_writer else None)


def write_configs(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Write the config files, before the weights: transformers removes weight files that are not its own."""
    config.dtype = dtype
    with torch.device("meta"):
        plain = auto_class(config, sees=True).from_config(config)
    plain.save_pretrained(folder, state_dict={})


def put_beside(scratch: Path, folder: Path) -> None:
    if folder.exists():
        folder.rename(scratch.with_name("replaced"))
    scratch.rename(folder)


def model_bytes(
    model: nn.Module, dtype: torch.dtype, *, is_adapter: bool = False
) -> int:
    if is_adapter:
        return sum(
            p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
        )
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.tmp-", dir=folder.parent
    ) as around:
        (inner := Path(around, folder.name)).mkdir()
        yield inner


def _together(model: RingModel, work: Callable[[], None] | Exception | None) -> None:

    def attempt() -> None:
        try:
            if isinstance(work, Exception):
                raise work
            if work is not None:
                work()
        except (OSError, SafetensorError, MemoryError) as error:
            raise CheckpointError(
                f"{type(error).__name__}: {one_line(error)}"
            ) from error

    voted(model, "writing the model", attempt)


_PREFIX: Final = "model/"


def export_checkpoint(
    run: Path, step: int | None, folder: Path, *, max_shard_size: int | str = MAX_SHARD_SIZE,
    doing: Callable[[str], None] = lambda what: None,
) -> tuple[int, int]:  # fmt: skip
    """Export a checkpoint (None: the newest) like ``<run>/model``; return its step and weight bytes."""
    _refuse_existing(folder)
    config, saved = _settings_of(run), _checkpoint_of(run, step)
    if config.adapter.rank is not None:
        raise ConfigError(
            f"{run}: its checkpoints hold an adapter alone; use the adapter or merged model in {run / 'model'} "
            "(--merge makes a merged model of an adapter's folder)"
        )
    manifest = read_manifest(saved)
    for number, name in enumerate(sorted(manifest.files), start=1):
        doing(f"checking file {number} of {len(manifest.files)}")
        verify(saved, manifest, name)
    model_config = load_model_config(config)
    dtype = dtype_named(config.model.dtype)
    with torch.device("meta"):
        auto = auto_class(model_config, sees=config.data.messages is not None)
        plain: Any = auto.from_config(
            model_config, trust_remote_code=config.model.trust_remote_code
        )
    if config.data.documents != "separate":
        note_length(plain, config.data.sequence_length_tokens, says=False)
    tensors: dict[str, Tensor] = {}
    for place, (name, aliases) in enumerate(saved_names(plain).items()):
        stored = next(
            (_PREFIX + each for each in aliases if _PREFIX + each in manifest.tensors),
            None,
        )
        if stored is None:
            raise CheckpointError(
                f"{saved}: has no {name}; is it of another model? use its own"
            )
        tensors[name] = deferred(_Saved(saved, stored, manifest.tensors[stored], place))
    plan = plan_files(plain, tensors, max_shard_size=max_shard_size, dtype=dtype)

    def write_rest(scratch: Path) -> None:
        with as_trained(plain):
            write_configs(scratch, plain.config, dtype)
        if tokenizer := tokenizer_of(run):
            shutil.copytree(tokenizer, scratch, dirs_exist_ok=True)

    _write(plan, plain.num_parameters(), folder, write_rest, doing)
    return manifest.step, plan.num_bytes


def export_merged(
    adapter: Path, folder: Path, *, max_shard_size: int | str = MAX_SHARD_SIZE,
    doing: Callable[[str], None] = lambda what: None,
) -> int:  # fmt: skip
    """Export the base model of an adapter folder with the adapter merged into it; return the bytes of its weights.

    The base is held in memory, in the dtype of its files, also if the adapter was trained over packed weights.
    """
    _refuse_existing(folder)
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{adapter}: has no {ADAPTER_CONFIG}; give the folder that the adapter was saved in"
        )
    doing("merging")
    settings = GenerateSettings(folder=str(adapter))
    config = load_config(settings)
    model = load_model(settings, config)
    found = model.state_dict()
    tensors = {name: found[name] for name in saved_names(model)}
    plan = plan_files(model, tensors, max_shard_size=max_shard_size)

    def write_rest(scratch: Path) -> None:
        model.save_pretrained(scratch, state_dict={})
        if tokenizer_folder(str(adapter)) is not None:
            load_tokenizer(str(adapter), config).save_pretrained(scratch)

    _write(plan, model.num_parameters(), folder, write_rest, doing)
    return plan.num_bytes


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(
            f"{folder}: is there already; give another folder, or remove it"
        )


def _write(
    plan: WeightsPlan, num_parameters: int, folder: Path, write_rest: Callable[[Path], None],
    doing: Callable[[str], None],
) -> None:  # fmt: skip
    """Write a plan's weight files and the rest into a temporary folder, then put it in place; raise CheckpointError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if problem := missing_room(folder.parent, plan.num_bytes):
        raise CheckpointError(problem)
    with (
        refused(f"{folder} was not written", OSError, error_type=CheckpointError),
        scratch_beside(folder) as scratch,
    ):
        # Before the weights, since transformers removes weight files that are not its own.
        write_rest(scratch)
        for number, name in enumerate(plan.files, start=1):
            doing(f"writing file {number} of {len(plan.files)}")
            plan.write(name, scratch)
        plan.write_index(scratch, num_parameters)
        put_beside(scratch, folder)


def _settings_of(run: Path) -> TrainConfig:
    if not (run / RECORD).exists():
        raise ConfigError(
            f"{run}: is no folder of a run ({RECORD} is missing); give the one that run = ... named"
        )
    with refused(
        f"{run / RECORD}: is not the record of a run",
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):
        return recorded(json.loads(read_small(run / RECORD))["config"])[0]


def _checkpoint_of(run: Path, step: int | None) -> Path:
    there = [
        int(name.removeprefix("step_")) for name in saved_steps(run / "checkpoints")
    ]
    if not there:
        raise ConfigError(f"{run}: has no checkpoint; train it first")
    chosen = there[-1] if step is None else step
    if chosen not in there:
        raise ConfigError(
            f"{run}: has no checkpoint of step {chosen}; there are {', '.join(map(str, there))}; use one"
        )
    return run / "checkpoints" / f"step_{chosen:08d}"


class _Saved:
    def __init__(self, folder: Path, name: str, entry: TensorEntry, place: int) -> None:
        self.name, self.shape, self.dtype = (
            name,
            entry.shape,
            dtype_named(entry.dtype),
        )
        self.place: tuple[int, int] = (place, 0)
        self._folder, self._entry = folder, entry

    def read(self, region: Region) -> Tensor:
        chunk = Chunk(
            tuple(each.start for each in region),
            torch.empty(shape_of(region), dtype=self.dtype),
        )
        with opened_files(self._folder) as shard:
            read_chunk(chunk, self.name, self._entry, self._folder, shard)
        return chunk.data
