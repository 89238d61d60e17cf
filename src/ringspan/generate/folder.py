"""A model's folder: config, tokenizer and weights, refused in a line if they make no model."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_CONFIG,
    read_small,
)
from ringspan.core.files.weights import INDEX, WEIGHTS
from ringspan.core.messages.extras import require
from ringspan.core.messages.lines import refused
from ringspan.generate.chat_template import refuse_broken
from ringspan.generate.settings import GenerateSettings
from ringspan.torch.model.adapters import asking_as_before, base_of
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.positions import num_trained_positions
from ringspan.torch.model.support import refuse_config, refuse_quantised
from ringspan.torch.model.tensor_parallel.split import refuse_heads
from ringspan.torch.model.tied import settle_ties, tied_names, untie
from ringspan.torch.model.weights.base import check_base
from ringspan.torch.model.weights.files import WeightFiles, folder_of
from ringspan.torch.model.weights.loading import read_whole, unread_model
from ringspan.torch.runtime.dtypes import dtype_named


def load_config(settings: GenerateSettings) -> PreTrainedConfig:
    folder = base_folder(settings.folder)
    with refused(
        settings.folder, OSError, ValueError, KeyError, TypeError, StrictDataclassError
    ):
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{settings.folder}: {config.model_type} is no causal language model of transformers; use one"
        )
    refuse_config(config)
    refuse_quantised(config)
    refuse_heads(config, settings.tp)
    dtype_of(settings, config)
    return config


def base_folder(folder: str) -> str:
    """Return the folder of config and weights: this one, or its adapter's base (folder or local Hub copy)."""
    path = Path(folder, ADAPTER_CONFIG)
    if not path.is_file():
        return folder
    if Path(folder, MODEL_CONFIG).is_file() and any(
        Path(folder, name).is_file() for name in (WEIGHTS, INDEX)
    ):
        return folder
    require(f"{folder}, an adapter,", "peft")
    with refused(
        f"{path}: cannot be read", OSError, ValueError, AttributeError, RecursionError
    ):
        base = json.loads(read_small(path)).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path}: does not say which model it is for; set base_model_name_or_path"
        )
    try:
        return str(folder_of(base, local_files_only=True))
    except (OSError, ValueError) as error:  # as the Hub's client raises it
        raise ConfigError(
            f"{path}: its base model {base!r} is neither a folder nor in the local cache of the Hub; download it, or "
            "set base_model_name_or_path to where it is"
        ) from error


def dtype_of(settings: GenerateSettings, config: PreTrainedConfig) -> torch.dtype:
    """Return the settings' dtype, else the folder's; raise ConfigError for one that is not tested."""
    own = getattr(text_config(config), "dtype", None) or torch.float32
    name = (
        str(own).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
    )
    if name not in ("float32", "bfloat16"):
        raise ConfigError(
            f"{settings.folder}: its weights are {name}; choose --dtype float32 or bfloat16"
        )
    return dtype_named(name)


def has_tokenizer(folder: str) -> bool:
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    )
    return any(Path(folder, name).exists() for name in names)


def tokenizer_folder(folder: str) -> str | None:
    """Return the folder whose tokenizer is taken: this one or the base of its adapter; None without any."""
    return next(
        (each for each in (folder, base_folder(folder)) if has_tokenizer(each)), None
    )


def load_tokenizer(
    folder: str, config: PreTrainedConfig, *, chats: bool = False
) -> Tokenizer:
    """Load the tokenizer; raise ConfigError if it is missing or has a larger vocabulary than the model.

    With ``chats``, its chat template, if any, must be valid.
    """
    source = tokenizer_folder(folder)
    if source is None:
        raise ConfigError(
            f"{folder}: has no tokenizer (tokenizer.json); save it there with save_pretrained"
        )
    # tokenizers raises plain Exceptions for unreadable files.
    with refused(f"{folder}: its tokenizer cannot be read", Exception):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
    # Added tokens, such as an image's, may have ids beyond a text model's vocabulary; a prompt with them is refused.
    vocabulary = text_config(config).vocab_size
    if tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, the model only {vocabulary}; use the "
            "tokenizer that belongs to the model"
        )
    if chats and tokenizer.chat_template:
        refuse_broken(tokenizer, source)
    return tokenizer


def check_ids(
    ids: Sequence[int], settings: GenerateSettings, config: PreTrainedConfig
) -> None:
    text = text_config(config)
    if not len(ids):
        raise ConfigError("the prompt is empty; at least one token is needed")
    if (largest := max(ids)) >= text.vocab_size:
        raise ConfigError(
            f"{settings.folder}: its tokenizer makes token {largest} of this prompt, the model has {text.vocab_size}; "
            "use the tokenizer that belongs to the model"
        )
    limit = num_trained_positions(text)
    if limit is not None and len(ids) + settings.max_new_tokens > limit:
        raise ConfigError(
            f"{len(ids):,} tokens of prompt and {settings.max_new_tokens:,} new ones are more than the {limit:,} "
            "positions of the model; shorten the prompt, lower --max-new-tokens, or scale its rotary positions "
            "(rope_parameters and max_position_embeddings in config.json)"
        )


def load_model(settings: GenerateSettings, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model without weights, which ``parallelize`` reads in parts; with an adapter, merged on the CPU."""
    folder = base_folder(settings.folder)
    is_adapter = Path(settings.folder, ADAPTER_CONFIG).is_file()
    files = WeightFiles(Path(folder), config, adapter=is_adapter)
    if is_adapter:
        check_base(Path(settings.folder), folder, files)
    model, _ = unread_model(
        folder, Path(folder), files, config, dtype_of(settings, config)
    )
    if is_adapter:
        read_whole(model)
        model = _with_adapter(model, settings.folder)
    return model.eval()


def _with_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    from peft import PeftModel

    if not Path(folder, ADAPTER_WEIGHTS).is_file():
        raise ConfigError(
            f"{folder}: has no {ADAPTER_WEIGHTS}; save the adapter with save_pretrained"
        )
    kinds = OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError
    tied = tied_names(model)
    with refused(f"{folder}: is no adapter for this model", *kinds), asking_as_before():
        peft = PeftModel.from_pretrained(model, folder, is_trainable=False)
        # Tied layers that the adapter wraps have other names, and are no longer tied once merged.
        is_apart = tied_names(base_of(peft)) != tied
        if is_apart:
            untie(base_of(peft))
        merged = peft.merge_and_unload(safe_merge=True)
    if is_apart:
        settle_ties(merged, tied)
    return merged
