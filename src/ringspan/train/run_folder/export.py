"""A run's result: a Hugging Face folder, complete or absent."""

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
from ringspan.train.adapter import plan_merged, write_adapter

if TYPE_CHECKING:  # it reads text, which folders are written without
    from ringspan.train.model import Tokenizer


def save_model(
    model: Any, tokenizer: "Tokenizer", folder: Path, dtype: torch.dtype, *, merge: bool = False
) -> str | None:
    """Write weights, config and tokenizer into ``folder``; return any error on every rank, all of which call it.

    Of an adapter, itself or the weights merged tensor by tensor. Rank 0 writes the pieces they send into a temporary
    folder, which then replaces one of that name.
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
    with as_trained(base):
        return type(base.config).from_dict(base.config.to_dict())


def write_configs(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Write all but the weights, before them: transformers removes weight files that are not its own."""
    config.dtype = dtype
    with torch.device("meta"):
        plain = auto_class(config, sees=True).from_config(config)
    plain.save_pretrained(folder, state_dict={})


def put_beside(scratch: Path, folder: Path) -> None:
    if folder.exists():
        folder.rename(scratch.with_name("replaced"))
    scratch.rename(folder)


def model_bytes(model: Any, dtype: torch.dtype, *, is_adapter: bool = False) -> int:
    if is_adapter:
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as around:
        (inner := Path(around, folder.name)).mkdir()
        yield inner


def _together(model: Any, work: Callable[[], None] | Exception | None) -> None:
    """Call ``voted``; a full disk or short memory is a CheckpointError."""

    def attempt() -> None:
        try:
            if isinstance(work, Exception):
                raise work
            if work is not None:
                work()
        except (OSError, SafetensorError, MemoryError) as error:
            raise CheckpointError(f"{type(error).__name__}: {one_line(error)}") from error

    voted(model, "writing the model", attempt)
