"""The adapter of a run: PEFT matrices beside the model's weights, written as a folder that PEFT opens, or merged."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import one_line
from ringspan.torch.model.adapters import asking_as_before
from ringspan.train.config.tables import TrainConfig

BASE_PREFIX: Final = "base_model.model."  # of the names of a model's weights inside of PEFT's


def add_adapter(model: PreTrainedModel, config: TrainConfig) -> Any:
    """Add the run's adapter, trained alone and in float32; return the model unchanged if the run has none.

    Raises:
        ConfigError: target_modules that are absent, unsupported by PEFT, or share weights that could not be merged.
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
        with asking_as_before():
            peft: Any = get_peft_model(model, lora)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"adapter.target_modules = {targets}: {one_line(error)}") from error
    if settings.merge:
        _refuse_tied(peft)
    path = config.model.path
    if path is not None and Path(path).is_dir():  # so that the adapter finds it from anywhere
        peft.peft_config["default"].base_model_name_or_path = str(Path(path).resolve())
    return peft


def _refuse_tied(peft: Any) -> None:
    """Refuse to merge into weights that two layers share: the other layer would change too."""
    names: dict[int, list[str]] = {}
    for name, parameter in peft.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for each in names.values():
        if len(each) > 1 and any(".base_layer." in name for name in each):
            shown = " and ".join(name.removeprefix(BASE_PREFIX).replace(".base_layer.", ".") for name in each)
            raise ConfigError(
                f"adapter.merge = true: {shown} are one weight, so that merging would change both layers; leave merge "
                "out, or name other target_modules"
            )


def write_adapter(model: Any, weights: dict[str, Any], folder: Path) -> None:
    """Write an adapter folder that ``PeftModel.from_pretrained`` opens."""
    # The method of PEFT itself: the ring's gathers the weights, which rank 0 has here already.
    from peft import PeftModel

    PeftModel.save_pretrained(model, str(folder), state_dict=weights)
