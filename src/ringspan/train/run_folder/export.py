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
from ringspan.torch.model.adapters import base_of, is_peft
from ringspan.torch.model.causal_lm import whole_weights
from ringspan.train.adapter import merged, write_adapter

_HEADROOM_BYTES: Final = 1 << 25  # a tokenizer with all its files, the config, and folders


def save_model(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, *, merge: bool = False
) -> str | None:
    """Gather the sharded weights and write ``folder`` (safetensors, config, tokenizer), which ``from_pretrained``
    opens; what went wrong, on every rank, if anything did. Of a model with an adapter, the adapter alone, or the
    weights with it added to them.

    Every rank calls it; rank 0 writes, into a temporary folder beside it that is then renamed. A folder of that name is
    replaced.
    """
    is_adapter = is_peft(model) and not merge
    if problem := _on_first_rank(lambda: _room_for(folder, model_bytes(model, dtype, is_adapter=is_adapter))):
        return problem
    weights = whole_weights(model)

    def write(complete: Path) -> None:
        if is_adapter:
            write_adapter(model, weights, complete)
        else:
            _plain(model, weights, dtype).save_pretrained(complete)
        tokenizer.save_pretrained(complete)

    return _on_first_rank(lambda: _replace(folder, write))


def model_bytes(model: Any, dtype: torch.dtype, *, is_adapter: bool = False) -> int:
    """What the whole weights take in a file, tied ones once; of an adapter, its own, which stay in their dtype."""
    if is_adapter:
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
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


def _plain(model: Any, weights: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model of one process with these weights, adapters added to them."""
    base: Any = base_of(model) if is_peft(model) else model
    with as_trained(base):
        config = type(base.config).from_dict(base.config.to_dict())
    config.dtype = dtype
    if is_peft(model):
        return merged(model, config, weights, dtype)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    plain.tie_weights()
    return plain


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Let a folder be written beside its place, and take it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as scratch:
        complete = Path(scratch, folder.name)
        write(complete)
        if folder.exists():
            folder.rename(Path(scratch, "replaced"))
        complete.rename(folder)
