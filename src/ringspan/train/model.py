"""A run's model and tokenizer: from a folder, the Hub, or new."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from ringspan.core.costs import training_flops
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.files.named import why_no_config
from ringspan.core.messages.lines import refused
from ringspan.generate.chat_template import refuse_broken
from ringspan.plan.model.hub import from_hub
from ringspan.torch.model.layers.decoder import (
    decoder_of,
    head_counts,
    head_sizes,
    text_config,
    without_attention,
)
from ringspan.torch.model.support import refuse_config
from ringspan.torch.model.tensor_parallel.split import refuse_heads
from ringspan.torch.model.weights.files import WeightFiles, folder_of
from ringspan.torch.model.weights.loading import auto_class, first_of, unread_model
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.train.config.model_table import ModelConfig
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data.seen import VIDEO_REMEDY
from ringspan.train.data.tokens import train_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# A tokenizer of text, or for conversations with images their processor, which has one.
Tokenizer = PreTrainedTokenizerBase | ProcessorMixin


def load_model_config(config: TrainConfig) -> PreTrainedConfig:
    """Load the model's config; refuse one that cannot be exact before reading anything else."""
    settings = config.model
    with refused(
        f"model.{'path' if settings.init == 'pretrained' else 'config'}",
        OSError,
        ValueError,
        KeyError,
        TypeError,
        StrictDataclassError,
    ):
        model_config = _model_config(settings)
    if not _has_language_model(model_config, sees=config.data.messages is not None):
        raise ConfigError(
            f"model: transformers has no causal language model of type {model_config.model_type}; choose one that "
            "AutoModelForCausalLM makes"
        )
    refuse_config(model_config)
    if (
        settings.init == "pretrained"
        and getattr(model_config, "quantization_config", None) is not None
    ):
        raise UnsupportedError(
            f"model.path = {settings.path!r}: its files are quantised, and ringspan train reads weights of 16 or 32 "
            "bits; set model.path to the model that they were made of, or train an adapter over packed weights in "
            "Python, see docs/adapters.md"
        )
    refuse_heads(model_config, config.mesh.tp)
    text = text_config(model_config)
    if settings.rope is not None:
        scale_rope(text, settings.rope)
    limit = _most_positions(text, settings)
    if (
        settings.init == "scratch"
        and limit is not None
        and limit < config.data.sequence_length_tokens
    ):
        raise ConfigError(
            f"model.config.max_position_embeddings = {limit}: is less than data.sequence_length_tokens = "
            f"{config.data.sequence_length_tokens}; raise it"
        )
    return model_config


def _has_language_model(config: PreTrainedConfig, *, sees: bool) -> bool:
    """Return whether transformers, or a config's own code, has a causal language model of it, or one that sees."""
    if sees and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return True
    own_code = getattr(config, "auto_map", None) or {}
    return (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        or "AutoModelForCausalLM" in own_code
    )


def _most_positions(text: PreTrainedConfig, settings: ModelConfig) -> int | None:
    """Return the most positions that a config of text allows, scaled as the settings say; None without a limit."""
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None or settings.rope is None:
        return limit
    if settings.rope.get("type") == "dynamic":
        # transformers keeps the original limit in a config with dynamic scaling.
        return int(limit * settings.rope["factor"])
    return limit


def _model_config(settings: ModelConfig) -> PreTrainedConfig:
    if settings.init == "scratch":
        return AutoConfig.for_model(**settings.config_values())
    assert settings.path is not None, "checked by ModelConfig"
    if (local := Path(settings.path)).exists():
        reason = (
            f"is a file; give the folder of {local.name}"
            if local.is_file()
            else why_no_config(local)
        )
        if reason:
            raise ConfigError(f"model.path = {settings.path!r}: {reason}")
    try:
        with from_hub(f"model.path = {settings.path!r}", settings.path):
            return AutoConfig.from_pretrained(
                settings.path, trust_remote_code=settings.trust_remote_code
            )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"model.path = {settings.path!r}: comes with Python files, which are not run; read them, then set "
            "model.trust_remote_code = true"
        ) from error


_ROPE_TYPES: Final = ("linear", "dynamic", "yarn", "llama3", "longrope")


def scale_rope(model_config: PreTrainedConfig, rope: dict[str, Any]) -> None:
    """Scale a config's rotary positions in place, to ``factor`` times the trained length (``dynamic`` derives it)."""
    kind, factor = rope.get("type"), rope.get("factor")
    if kind not in _ROPE_TYPES:
        raise ConfigError(
            f"model.rope.type = {kind!r}: choose one of {', '.join(_ROPE_TYPES)}"
        )
    if (
        not isinstance(factor, int | float)
        or isinstance(factor, bool)
        or not factor >= 1
    ):
        raise ConfigError(
            f"model.rope.factor = {factor!r}: should be a number of at least 1"
        )
    given = getattr(model_config, "rope_parameters", None) or {}
    if "rope_theta" not in given:
        raise ConfigError(
            f"model.rope: {model_config.model_type} has no rotary positions that all its layers share; remove it, or "
            "set model.config.rope_parameters"
        )
    trained = (
        given.get("original_max_position_embeddings")
        or model_config.max_position_embeddings
    )
    values = {
        name: given[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in given
    }
    values |= {"rope_type": kind, "factor": float(factor)}
    if kind in ("yarn", "llama3", "longrope"):
        values["original_max_position_embeddings"] = trained
    if kind == "llama3":
        # The values of Llama 3.1.
        values |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    model_config.rope_parameters = values | {
        name: value for name, value in rope.items() if name != "type"
    }
    model_config.max_position_embeddings = (
        trained if kind == "dynamic" else math.ceil(trained * factor)
    )
    with refused("model.rope", KeyError, TypeError, ValueError):
        model_config.validate_rope()


def load_tokenizer(
    settings: ModelConfig,
    model_config: PreTrainedConfig,
    documents: "Dataset | None" = None,
    kept: Path | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer: ``kept``, the one of its source, or one trained on ``documents``.

    Refuse one that is too large.
    """
    source = str(kept) if kept else settings.tokenizer_source
    vocabulary = text_config(model_config).vocab_size
    if source == "train":
        assert documents is not None, "of a run that trains one"
        tokenizer: PreTrainedTokenizerBase = train_tokenizer(documents, vocabulary)
    else:
        assert source is not None, "checked by ModelConfig"
        where = f"model.tokenizer = {source!r}"
        with refused(where, OSError, ValueError, KeyError), from_hub(where, source):
            tokenizer = AutoTokenizer.from_pretrained(
                source, trust_remote_code=settings.trust_remote_code
            )
    _refuse_foreign(tokenizer, vocabulary)
    return tokenizer


def _refuse_foreign(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    if tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"model.tokenizer has {tokenizer.vocab_size} tokens, the model only {vocabulary}; "
            "use the tokenizer that belongs to the model"
        )


def load_processor(
    settings: ModelConfig, model_config: PreTrainedConfig, kept: Path | None = None
) -> Tokenizer:
    """Load the processor of conversations: ``kept``, else the model's; a tokenizer for text."""
    source = str(kept) if kept else settings.tokenizer_source
    if source is None or source == "train":
        raise ConfigError(
            f"model.tokenizer = {source!r}: data.messages needs the processor of a model; give its folder"
        )
    where = f"model.tokenizer = {source!r}"
    with (
        refused(f"{where}: has no processor", OSError, ValueError, KeyError, TypeError),
        refused(
            f"{where}: its processor needs a package that is missing",
            ImportError,
            remedy=f"; {VIDEO_REMEDY}",
        ),
        from_hub(where, source),
    ):
        processor: Any = AutoProcessor.from_pretrained(
            source, trust_remote_code=settings.trust_remote_code
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"model.tokenizer = {source!r}: {type(processor).__name__} makes no tokens of text; use another"
        )
    if getattr(processor, "chat_template", None) is None:
        raise ConfigError(
            f"model.tokenizer = {source!r}: has no chat template, which data.messages need"
        )
    refuse_broken(processor, where)
    _refuse_foreign(tokenizer, text_config(model_config).vocab_size)
    return processor


def build_model(
    settings: ModelConfig,
    model_config: PreTrainedConfig,
    *,
    seed: int = 0,
    sees: bool = False,
) -> PreTrainedModel:
    """Build the model in model.parameter_dtype: new on the CPU, or from a folder, with weights read later."""
    dtype, made_by = (
        dtype_named(settings.parameter_dtype),
        auto_class(model_config, sees=sees),
    )
    if settings.init == "scratch":
        torch.manual_seed(seed)
        return made_by.from_config(model_config, dtype=dtype)
    assert settings.path is not None, "checked by ModelConfig"
    where = f"model.path = {settings.path!r}"
    with refused(where, OSError, ValueError), from_hub(where, settings.path):
        folder = folder_of(settings.path)
    model, extra = unread_model(
        where,
        folder,
        WeightFiles(folder, model_config),
        model_config,
        dtype,
        trust_remote_code=settings.trust_remote_code,
        model_class=made_by,
    )
    if extra:
        logger.warning(
            "%s: the model has no place for %s, left out", where, first_of(extra)
        )
    return model


def num_matmul_parameters(model: PreTrainedModel) -> int:
    decoder: Any = decoder_of(model)
    modules = (*decoder.modules(), model.get_output_embeddings())
    return sum(
        module.weight.numel()
        for module in modules
        if isinstance(module, torch.nn.Linear)
    )


def flops_per_token(
    model_config: PreTrainedConfig, num_weights: float, length_tokens: float
) -> float:
    """Compute a training step's model FLOPs per token, which sees ``length_tokens / 2`` keys on average.

    Layers with a state count only their products with weights.
    """
    counts = zip(head_counts(model_config), head_sizes(model_config), strict=True)
    without = without_attention(model_config)
    sizes = [
        heads * size
        for number, ((heads, _), size) in enumerate(counts)
        if number not in without
    ]
    return training_flops(num_weights, 1, length_tokens / 2 * sum(sizes))
