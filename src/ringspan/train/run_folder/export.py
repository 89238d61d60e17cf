"""The result of a run: an ordinary Hugging Face folder, complete or not there at all."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from ringspan.core.errors import CheckpointError
from ringspan.core.messages.lines import one_line
from ringspan.torch.layers.positions import as_trained
from ringspan.torch.model.adapters import adapter_weights, base_of, is_peft
from ringspan.torch.model.saving import voted
from ringspan.torch.weights.loading import auto_class
from ringspan.torch.weights.saving import plan_weights, write_weights
from ringspan.torch.weights.writing import MAX_SHARD_SIZE, missing_room
from ringspan.train.adapter import write_adapter
from ringspan.train.merging import plan_merged

if TYPE_CHECKING:  # it reads text, which folders are written without
    from ringspan.train.model import Tokenizer


def save_model(
    model: Any, tokenizer: "Tokenizer", folder: Path, dtype: torch.dtype, *, merge: bool = False
) -> str | None:
    """Write the sharded weights into ``folder`` (safetensors, config, tokenizer), which ``from_pretrained`` opens; what
    went wrong, on every rank, if anything did. Of a model with an adapter, the adapter alone, or the weights with it
    added to them.

    Every rank calls it; rank 0 writes what they send, a piece of a tensor at a time, into a temporary folder beside it
    that is then renamed. A folder of that name is replaced. An adapter is added to one tensor after the other.
    """
    try:
        if is_peft(model) and not merge:
            _save_adapter(model, tokenizer, folder, dtype)
        else:
            _save_whole(model, tokenizer, folder, dtype, merge=is_peft(model))
    except CheckpointError as error:
        return str(error)
    return None


def _save_whole(model: Any, tokenizer: "Tokenizer", folder: Path, dtype: torch.dtype, *, merge: bool) -> None:
    is_writer, base = dist.get_rank() == 0, base_of(model) if merge else model
    config = _config_of(base)
    if merge:
        plan = plan_merged(model, config, dtype, is_writer=is_writer)
    else:
        plan = plan_weights(model, model.ring_mesh, max_shard_size=MAX_SHARD_SIZE, dtype=dtype)
    with ExitStack() as stack:
        scratch: list[Path] = []

        def begin() -> None:
            if problem := missing_room(folder.parent, plan.num_bytes):
                raise CheckpointError(problem)
            scratch.append(stack.enter_context(scratch_beside(folder)))
            write_configs(scratch[0], config, dtype)

        def finish() -> None:
            beside = sum(p.numel() for p in base.parameters() if p.requires_grad) if merge else 0
            plan.write_index(scratch[0], base.num_parameters() - beside)
            tokenizer.save_pretrained(scratch[0])
            put_beside(scratch[0], folder)

        _together(model, begin if is_writer else None)
        write_weights(plan, scratch[0] if is_writer else None, lambda _, error: _together(model, error))
        _together(model, finish if is_writer else None)


def _save_adapter(model: Any, tokenizer: "Tokenizer", folder: Path, dtype: torch.dtype) -> None:
    is_writer = dist.get_rank() == 0

    def begin() -> None:
        if problem := missing_room(folder.parent, model_bytes(model, dtype, is_adapter=True)):
            raise CheckpointError(problem)

    def write() -> None:
        with scratch_beside(folder) as scratch:
            write_adapter(model, weights, scratch)
            tokenizer.save_pretrained(scratch)
            put_beside(scratch, folder)

    _together(model, begin if is_writer else None)
    weights = adapter_weights(model, {})
    _together(model, write if is_writer else None)


def _config_of(base: Any) -> PreTrainedConfig:
    """A copy of a model's config, with the length that it was trained on."""
    with as_trained(base):
        return type(base.config).from_dict(base.config.to_dict())


def write_configs(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Write what a model has beside its weights, into a folder without any: transformers removes files of weights that
    are not its own.
    """
    config.dtype = dtype
    with torch.device("meta"):
        plain = auto_class(config, sees=True).from_config(config)
    plain.save_pretrained(folder, state_dict={})


def put_beside(scratch: Path, folder: Path) -> None:
    """Let a complete folder take the place of another one."""
    if folder.exists():
        folder.rename(scratch.with_name("replaced"))
    scratch.rename(folder)


def model_bytes(model: Any, dtype: torch.dtype, *, is_adapter: bool = False) -> int:
    """What the whole weights take in a file, tied ones once; of an adapter, its own, which stay in their dtype."""
    if is_adapter:
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A folder to fill, in one that is removed afterwards with whatever is left in it."""
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as around:
        (inner := Path(around, folder.name)).mkdir()
        yield inner


def _together(model: Any, work: Callable[[], None] | Exception | None) -> None:
    """``voted``, where a disk that is full or memory that is short is a CheckpointError."""

    def attempt() -> None:
        try:
            if isinstance(work, Exception):
                raise work
            if work is not None:
                work()
        except (OSError, SafetensorError, MemoryError) as error:
            raise CheckpointError(f"{type(error).__name__}: {one_line(error)}") from error

    voted(model, "writing the model", attempt)
