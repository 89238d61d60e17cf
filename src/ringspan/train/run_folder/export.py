"""The result of a run: an ordinary Hugging Face folder, complete or not there at all."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ringspan.core.messages.lines import one_line
from ringspan.torch.layers.positions import as_trained
from ringspan.torch.model.causal_lm import whole_weights

_HEADROOM_BYTES: Final = 1 << 25  # a tokenizer with all its files, the config, and folders


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype
) -> str | None:
    """Gather the sharded weights and write ``folder`` (safetensors, config, tokenizer), which ``from_pretrained``
    opens; what went wrong, on every rank, if anything did.

    Every rank calls it; rank 0 writes, into a temporary folder beside it that is then renamed. A folder of that name is
    replaced.
    """
    if problem := _on_first_rank(lambda: _room_for(folder, model_bytes(model, dtype))):
        return problem
    weights = whole_weights(model)
    return _on_first_rank(lambda: _write(model, weights, tokenizer, folder, dtype))


def model_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """What the whole weights take in a file, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def _on_first_rank(work: Callable[[], str | None]) -> str | None:
    """What rank 0 says, on every rank; an error that is not ours to judge is said too, so that none is left waiting."""
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            said = [work()]
        except (OSError, SafetensorError, MemoryError) as error:
            said = [f"{type(error).__name__}: {one_line(error)}"]
    dist.broadcast_object_list(said)
    return said[0]


def _room_for(folder: Path, num_bytes: int) -> str | None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(folder.parent).free, num_bytes + _HEADROOM_BYTES
    return None if free >= needed else f"{needed:,} bytes are needed, {free:,} are free"


def _write(
    model: PreTrainedModel,
    weights: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    with as_trained(model):
        config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    plain.tie_weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as scratch:
        complete = Path(scratch, folder.name)
        plain.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        complete.rename(folder)
