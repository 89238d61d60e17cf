"""The result of a run: an ordinary Hugging Face folder, complete or not there at all."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from ringspan.core.errors import CheckpointError
from ringspan.core.messages.lines import one_line
from ringspan.torch.layers.positions import as_trained
from ringspan.torch.model.adapters import base_of, is_peft
from ringspan.torch.model.saving import whole_weights
from ringspan.torch.transport.collectives import gather
from ringspan.torch.weights.saving import plan_weights, write_weights
from ringspan.torch.weights.writing import MAX_SHARD_SIZE, WeightsPlan, missing_room
from ringspan.train.adapter import merged, write_adapter


def save_model(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, *, merge: bool = False
) -> str | None:
    """Write the sharded weights into ``folder`` (safetensors, config, tokenizer), which ``from_pretrained`` opens; what
    went wrong, on every rank, if anything did. Of a model with an adapter, the adapter alone, or the weights with it
    added to them.

    Every rank calls it; rank 0 writes what they send, a piece of a tensor at a time, into a temporary folder beside it
    that is then renamed. A folder of that name is replaced. Of a model with an adapter it gathers all weights first.
    """
    try:
        if is_peft(model):
            _save_with_adapter(model, tokenizer, folder, dtype, merge=merge)
        else:
            _save_plain(model, tokenizer, folder, dtype)
    except CheckpointError as error:
        return str(error)
    return None


def _save_plain(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    is_writer = dist.get_rank() == 0
    plan = plan_weights(model, model.ring_mesh, max_shard_size=MAX_SHARD_SIZE, dtype=dtype)
    with ExitStack() as stack:
        scratch: list[Path] = []

        def begin() -> None:
            if problem := missing_room(folder.parent, plan.num_bytes):
                raise CheckpointError(problem)
            scratch.append(stack.enter_context(scratch_beside(folder)))

        def finish() -> None:
            complete(scratch[0], plan, _config_of(model), model.num_parameters(), dtype)
            tokenizer.save_pretrained(scratch[0])
            put_beside(scratch[0], folder)

        _together(begin if is_writer else None)
        write_weights(plan, scratch[0] if is_writer else None, lambda _, error: _together(error))
        _together(finish if is_writer else None)


def _save_with_adapter(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, *, merge: bool
) -> None:
    is_writer = dist.get_rank() == 0

    def begin() -> None:
        if problem := missing_room(folder.parent, model_bytes(model, dtype, is_adapter=not merge)):
            raise CheckpointError(problem)

    def write() -> None:
        with scratch_beside(folder) as scratch:
            if merge:
                config = _config_of(base_of(model))
                config.dtype = dtype
                merged(model, config, weights, dtype).save_pretrained(scratch)
            else:
                write_adapter(model, weights, scratch)
            tokenizer.save_pretrained(scratch)
            put_beside(scratch, folder)

    _together(begin if is_writer else None)
    weights = whole_weights(model)
    _together(write if is_writer else None)


def _config_of(base: Any) -> PreTrainedConfig:
    """A copy of a model's config, with the length that it was trained on."""
    with as_trained(base):
        return type(base.config).from_dict(base.config.to_dict())


def complete(
    folder: Path, plan: WeightsPlan, config: PreTrainedConfig, num_parameters: int, dtype: torch.dtype
) -> None:
    """Write what makes files of weights a model: their index, and the configs."""
    config.dtype = dtype
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(folder, state_dict={})
    plan.write_index(folder, num_parameters)


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


def _together(work: Callable[[], None] | Exception | None) -> None:
    """Do something, and raise on every rank what went wrong on any; an error that is not ours to judge is said too, so
    that none is left waiting.
    """
    problem = None
    try:
        if isinstance(work, Exception):
            raise work
        if work is not None:
            work()
    except CheckpointError as error:
        problem = str(error)
    except (OSError, SafetensorError, MemoryError) as error:
        problem = f"{type(error).__name__}: {one_line(error)}"
    if said := next(filter(None, gather(problem)), None):
        raise CheckpointError(said)
