"""The result of a run: an ordinary Hugging Face folder, complete or not there at all."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Gather the sharded weights and write ``folder`` (safetensors, config, tokenizer), which ``from_pretrained``
    opens.

    Every rank calls it; rank 0 writes, into a temporary folder beside it that is then renamed. A folder of that name is
    replaced.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with _unadvised():
        weights: dict[str, Any] = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.use_cache = True
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
    dist.barrier()


@contextmanager
def _unadvised() -> Iterator[None]:
    """Without DTensor's advice on how tensors that are split twice are gathered faster: it is done once."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
