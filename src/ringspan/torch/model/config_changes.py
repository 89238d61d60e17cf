"""Detection of config changes after ``parallelize``, which reads the config once."""

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from transformers import PreTrainedConfig

from ringspan.core.errors import UnsupportedError

# Names and fields of saved files, which change no number that a model computes. Weights are compared separately.
_NAMES: Final = frozenset((
    "_commit_hash", "_from_model_config", "_name_or_path", "name_or_path", "architectures", "auto_map", "dtype",
    "finetuning_task", "id2label", "keys_to_ignore_at_inference", "label2id", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers_version",
    # Training on a ring keeps no cache.
    "use_cache",
))  # fmt: skip
# Fields that do not change what a model on a ring computes, or that every forward pass reads again.
_FREE: Final = _NAMES | frozenset((
    # Weights are already tied, or are not.
    "tie_word_embeddings",
    # Every pass reads these. TRL's fused head reads the coefficient; models have copied it when they were built.
    "router_aux_loss_coef", "output_router_logits", "_experts_implementation", "_experts_implementation_internal",
    # Tokenizers and ``generate`` use these.
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "max_length", "pad_token_id", "problem_type",
    "quantization_config", "sep_token_id",
))  # fmt: skip
# Values of fields that a config need not have.
_ABSENT: Final = {"attention_dropout": 0.0, "is_causal": True, "sliding_window": None}


def deciding_fields(config: PreTrainedConfig | dict[str, Any]) -> dict[str, Any]:
    """Return a config's (or dict's) fields that decide numbers, as JSON values."""

    def kept(value: object) -> object:
        if isinstance(value, dict):
            fields = sorted(value.items(), key=lambda field: str(field[0]))
            return {
                str(name): kept(each) for name, each in fields if name not in _NAMES
            }
        return (
            [kept(each) for each in value] if isinstance(value, list | tuple) else value
        )

    values = config if isinstance(config, dict) else config.to_dict()
    return json.loads(json.dumps(kept(values), default=str))


class ConfigCopy(NamedTuple):
    config: PreTrainedConfig
    fields: dict[str, Any]


def copy_configs(configs: Iterable[PreTrainedConfig]) -> tuple[ConfigCopy, ...]:
    distinct = {id(config): config for config in configs}.values()
    return tuple(ConfigCopy(config, _fields(config)) for config in distinct)


@torch.compiler.disable()
def check_configs(copies: Iterable[ConfigCopy]) -> None:
    for config, before in copies:
        if vars(config) == before:
            continue  # a config with another inside, or a tuple, never equals its copy
        now = _fields(config)
        if now != before:
            _compare(config.model_type, config, before, now)


def _fields(value: Any) -> Any:
    """Copy all config fields into dicts and lists: ``==`` of configs fails if layers differ (Gemma 4)."""
    if isinstance(value, PreTrainedConfig):
        value = vars(value)
    if isinstance(value, dict):
        return {name: _fields(each) for name, each in value.items()}
    return (
        [_fields(each) for each in value] if isinstance(value, list | tuple) else value
    )


def _compare(
    path: str, config: PreTrainedConfig, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Raise UnsupportedError for the first field that differs and matters, also in configs inside of ``config``.

    ``path``: the config's name in the message.
    """
    for name in sorted(before.keys() | now.keys()):
        if name in _FREE:
            continue
        old, new = (fields.get(name, _ABSENT.get(name)) for fields in (before, now))
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig) and isinstance(old, dict):
            _compare(f"{path}.{name}", inner, old, _fields(inner))
        elif old != new and (name in before or name in _ABSENT):
            public = name.removesuffix("_internal").removeprefix("_")
            raise UnsupportedError(
                f"config.{public} of {path} was changed from {old} to {new} after rs.parallelize, which reads it once; "
                "set it before, on a model that is not on a ring yet"
            )
