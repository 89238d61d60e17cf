"""A run's adapter: PEFT matrices, written as a folder that PEFT opens, or merged."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.messages.lines import refused
from ringspan.torch.model.adapters import asking_as_before, base_of, note_bases
from ringspan.torch.model.merged import plain_weights
from ringspan.torch.model.weights.shards import Readers
from ringspan.torch.model.weights.writing import MAX_SHARD_SIZE, WeightsPlan, plan_files
from ringspan.train.config.model_table import AdapterConfig


def add_adapter(
    model: PreTrainedModel, settings: AdapterConfig, path: str | None, *, seed: int = 0
) -> Any:
    """Add a run's adapter to the model of ``path``; only it trains, in float32. Without a rank, return the model."""
    lora = lora_config(settings)
    if lora is None:
        return model
    from peft import get_peft_model

    torch.manual_seed(seed)
    where = f"adapter.target_modules = {list(settings.target_modules)}"
    with refused(where, ValueError, TypeError, NotImplementedError), asking_as_before():
        peft: Any = get_peft_model(model, lora)
    # An absolute path lets the adapter find its base model from any folder.
    if path is not None and Path(path).is_dir():
        peft.peft_config["default"].base_model_name_or_path = str(Path(path).resolve())
    return peft


def lora_config(settings: AdapterConfig) -> Any:
    """Return PEFT's config of a run's adapter; None without a rank."""
    if settings.rank is None:
        return None
    from peft import LoraConfig, TaskType

    targets = list(settings.target_modules)
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.rank * 2 if settings.alpha is None else settings.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
        lora_dropout=0.0,
    )


def read_adapter(folder: str) -> Any:
    """Return PEFT's config of a folder's adapter; ConfigError if it cannot be read."""
    from peft import PeftConfig

    with refused(f"--adapter {folder!r}", OSError, ValueError, KeyError, TypeError):
        config = PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    return config


def write_adapter(model: Any, weights: dict[str, Any], folder: Path) -> None:
    # PEFT's own method: the model's override would gather weights that rank 0 already has.
    from peft import PeftModel

    PeftModel.save_pretrained(model, str(folder), state_dict=weights)
    note_bases(model, folder)


def plan_merged(
    model: Any, config: PreTrainedConfig, dtype: torch.dtype
) -> WeightsPlan:
    """Plan a merged model's files, on all ranks; the first gets each whole tensor in turn.

    Layers that share a weight no longer do once their adapters are merged, which this notes in ``config``.
    """
    base: Any = base_of(model)
    plain, tensors = plain_weights(model, config, Readers(base.ring_mesh))
    return plan_files(plain, tensors, max_shard_size=MAX_SHARD_SIZE, dtype=dtype)
