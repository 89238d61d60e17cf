"""The result of a run: an ordinary Hugging Face folder, complete or not there at all."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ringspan.torch.causal_lm import whole_weights


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Gather the sharded weights and write ``folder`` (safetensors, config, tokenizer), which ``from_pretrained``
    opens.

    Every rank calls it; rank 0 writes, into a temporary folder beside it that is then renamed. A folder of that name is
    replaced.
    """
    weights = whole_weights(model)
    if dist.get_rank() == 0:
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
    dist.barrier()
