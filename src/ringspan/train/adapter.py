"""The adapter of a run: PEFT's matrices beside the model's weights, written as a folder that PEFT opens, or merged."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import one_line
from ringspan.train.config.tables import TrainConfig

BASE_PREFIX: Final = "base_model.model."  # of the names of a model's weights inside of PEFT's


def add_adapter(model: PreTrainedModel, config: TrainConfig) -> Any:
    """The model with the adapter of a run around it, whose matrices alone are trained, in float32; the model itself
    where the run has none.

    Raises:
        ConfigError: target_modules that the model does not have, or that PEFT cannot put matrices beside.
    """
    settings = config.adapter
    if settings.rank is None:
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    targets = list(settings.target_modules)
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=settings.rank * 2 if settings.alpha is None else settings.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
        lora_dropout=0.0,
    )
    torch.manual_seed(config.seed)
    try:
        peft: Any = get_peft_model(model, lora)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"adapter.target_modules = {targets}: {one_line(error)}") from error
    path = config.model.path
    if path is not None and Path(path).is_dir():  # so that the adapter finds it from anywhere
        peft.peft_config["default"].base_model_name_or_path = str(Path(path).resolve())
    return peft


def write_adapter(model: Any, weights: dict[str, Any], folder: Path) -> None:
    """An adapter folder that ``PeftModel.from_pretrained`` opens, from what it is to hold."""
    # The method of PEFT itself: the ring's gathers the weights, which rank 0 has here already.
    from peft import PeftModel

    PeftModel.save_pretrained(model, str(folder), state_dict=weights)


def merged(model: Any, config: PreTrainedConfig, weights: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A model of one process whose weights have the adapter added, from the whole weights of both."""
    from peft import get_peft_model

    lora = model.peft_config["default"]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
        peft: Any = get_peft_model(plain, lora)
    peft.load_state_dict(weights, assign=True)
    plain.tie_weights()
    return peft.merge_and_unload(safe_merge=True).to(dtype)
