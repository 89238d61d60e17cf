"""A tiny model of any kind that transformers knows: the same few sizes under every name that configs give them."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as SEEING,
)

from ringspan.proof.around import can_set, narrower, parts_of, small_around
from ringspan.proof.small import small_rope
from tests.every_model.hybrids import (
    DROPOUTS,
    HYBRIDS,
    INDEXED,
    SEEING_INDEXED,
    hybrid_config,
)

_MOST_PARAMETERS: Final = 30_000_000
# All model types; those that see or hear have a suffix.
MULTIMODAL: Final = ":multimodal"
# which transformers counts among sequence-to-sequence models
_SOUND: Final = (
    "audioflamingo3",
    "musicflamingo",
)
KINDS: Final = (*CAUSAL, *(kind + MULTIMODAL for kind in (*SEEING, *_SOUND)))
_VOCABULARY: Final = 97
_WIDTH: Final = 64
_LAYERS: Final = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
)
_SMALL = dict.fromkeys(_LAYERS, 2)
_SMALL |= dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_embed"), 64)
_SMALL |= dict.fromkeys(
    (
        "intermediate_size",
        "intermediate_size_mlp",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
    ),
    96,
)
_SMALL |= dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4
)
_SMALL |= dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2)
_SMALL |= dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512
)
_SMALL |= dict.fromkeys(
    ("moe_intermediate_size", "expert_dim", "shared_expert_intermediate_size"), 32
)
_SMALL |= dict.fromkeys(
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4
)
_SMALL |= dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2
)
_SMALL |= dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1)
_SMALL |= {
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_SMALL |= {
    "head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_SMALL |= {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "sliding_window": 8,
    "attention_chunk_size": 9,
    "rotary_dim": 8,
}
_SMALL |= {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "is_decoder": True,
    "word_embed_proj_dim": 64,
}

# Kinds of layers that a model can have beside those of its usual config.
_FURTHER_LAYERS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("dots1", "laguna", "mellum", "qwen2", "qwen2_moe", "qwen3", "smollm3"),
        ("sliding_attention",),
    ),
    "lfm2": ("conv",),
    "lfm2_moe": ("full_attention", "conv"),
    "minimax_m3_vl_text": ("minimax_m3_sparse",),
    "ministral": ("full_attention",),
}
_FURTHER_FEEDFORWARDS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("cohere2_moe", "mellum", "minimax_m3_vl_text"), ("dense",)),
    "deepseek_ocr2_text": ("dense", "sparse"),
}
# Fields that number the first layers, those with dense feed-forwards; or list them.
_NUM_DENSE: Final = ("first_k_dense_replace", "num_dense_layers")
_WINDOWED: Final = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
_SLIDING: Final = {
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window": 8,
}
_WITHOUT: Final = object()
_WINDOW: Final = {"sliding_window": 8}
_SCALED: Final = {"logits_scaling": 8.0, "attention_multiplier": 0.1}
# head sizes are those of latent attention
_LATENT: Final = {
    "head_dim": _WITHOUT,
    "num_key_value_heads": 4,
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
_LLAMA4: Final = {
    "num_hidden_layers": 4, "floor_scale": 8, "no_rope_layers": [1, 1, 0, 0], "interleave_moe_layer_step": 2,
}  # fmt: skip
_GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
# What a kind needs beside that, or what makes it show more of itself.
_CHANGES: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"), _LATENT),
    **dict.fromkeys(("minicpm3", "mistral4", "sarvam_mla", "youtu"), _LATENT),
    "chameleon": {"vocabulary_map": {"<image>": 95}},
    "longcat_flash": _LATENT | {"head_dim": 8},
    "step3p5": _WINDOW | _WINDOWED,
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    **dict.fromkeys(("mixtral", "phi3", "starcoder2"), _WINDOW),
    **dict.fromkeys(("qwen2", "qwen3"), _SLIDING),
    "smollm3": _SLIDING | {"no_rope_layers": [1, 1, 0, 0]},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "flint"), _SLIDING | {"mlp_only_layers": [0, 1]}),
    "cohere": {"logit_scale": 0.0625},
    "cohere_compass_text": _WINDOW | _WINDOWED | {"rope_parameters": {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }},
    "falcon": {"head_dim": _WITHOUT, "num_kv_heads": 4},
    "ernie4_5_moe": {"num_hidden_layers": 4, "moe_layer_start_index": 2, "moe_layer_end_index": 3},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4 | {"use_bidirectional_attention": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    **dict.fromkeys(("granite", "granitemoe", "granite_swa"), _SCALED),
    "llama4_text": _LLAMA4,
    "ministral3": {
        "rope_parameters": {
            "type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8,
            "max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip


def undropped_config(kind: str) -> PretrainedConfig:
    """The usual config of a model type, without dropout."""
    usual = usual_config(kind)
    for part in _nested(usual):
        for name in DROPOUTS:
            if (value := _value(part, name)) and can_set(part, name):
                setattr(part, name, value and type(value)(0))
    return usual


def usual_config(kind: str) -> PretrainedConfig:
    """The config of a model type as transformers has it."""
    return CONFIG_MAPPING[kind.removesuffix(MULTIMODAL)]()


def tiny_config(kind: str) -> PretrainedConfig:
    """The config of a model type, with the sizes above wherever it has a field of that name, and no dropout."""
    usual = usual_config(kind)
    text = _text_of(usual)
    # The decoder of a model with an encoder has a copy of its config.
    inner = any(part is text for part in _nested(usual) if part is not usual)
    return small_around(usual, _small_text(text if inner else usual))


def _small_text(usual: PretrainedConfig) -> PretrainedConfig:
    """A small config of a language model, and of what is inside of it."""
    values = _text_values(usual)
    if isinstance(values, PretrainedConfig):
        return values
    sizes = {getattr(usual, "hidden_size", 0): values.get("hidden_size", _WIDTH)}
    sizes |= {getattr(usual, "vocab_size", 0): _VOCABULARY}
    values |= {name: narrower(part, sizes).to_dict() for name, part in parts_of(usual)}
    values |= _CHANGES.get(usual.model_type, {})
    return type(usual)(
        **{name: value for name, value in values.items() if value is not _WITHOUT}
    )


def _nested(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for _, part in parts_of(config):
        yield from _nested(part)


def _text_of(config: PretrainedConfig) -> PretrainedConfig:
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # there are several
        return config


def _text_values(usual: PretrainedConfig) -> Any:
    """What makes the config of a language model small: two layers at least of each type, and with each type of
    feed-forward, that the model can have; all of it where that is written by hand.
    """
    kind = usual.model_type
    if kind in HYBRIDS | INDEXED | SEEING_INDEXED:
        return hybrid_config(kind)
    values: dict[str, Any] = {
        name: size
        for name, size in _SMALL.items()
        if _has(usual, name) and can_set(usual, name)
    }
    values |= {name: 0.0 for name in DROPOUTS if _has(usual, name)}
    values |= {name: 2 for name in vars(usual) if name.endswith("_pad_token_id")}
    types = list(
        dict.fromkeys(
            (*(_value(usual, "layer_types") or ()), *_FURTHER_LAYERS.get(kind, ()))
        )
    )
    if not _value(usual, "sliding_window") and "sliding_attention" not in types:
        values.pop("sliding_window", None)
    mlps = list(
        dict.fromkeys(
            (
                *_FURTHER_FEEDFORWARDS.get(kind, ()),
                *(_value(usual, "mlp_layer_types") or ()),
            )
        )
    )
    leading = [name for name in (*_NUM_DENSE, "mlp_only_layers") if _has(usual, name)]
    layers = max(2 * len(types), 4 if leading or len(mlps) > 1 else 2)
    values |= {name: layers for name in _LAYERS if name in values}
    values |= dict.fromkeys(
        (name for name in _NUM_DENSE if name in leading), layers // 2
    )
    if types and can_set(usual, "layer_types"):
        values["layer_types"] = (types * layers)[:layers]
    if mlps:
        values["mlp_layer_types"] = [
            mlps[i * len(mlps) // layers] for i in range(layers)
        ]
    rope = ("rope_parameters", "partial_rotary_factor")
    usual_rope = {name: _value(usual, name) for name in rope}
    return values | small_rope(usual, {"hidden_size": _WIDTH} | usual_rope | values)


def auto_class(kind: str) -> Any:
    """Which class of transformers makes the models of a type."""
    if not kind.endswith(MULTIMODAL):
        return AutoModelForCausalLM
    return (
        AutoModelForSeq2SeqLM
        if kind.removesuffix(MULTIMODAL) in _SOUND
        else AutoModelForMultimodalLM
    )


def tiny_model(kind: str) -> Any:
    """A model with random weights, the same each time, in float32.

    Raises:
        MemoryError: it is not tiny: the sizes go by names that are not known here.
    """
    config = tiny_config(kind)
    with torch.device("meta"):
        count = auto_class(kind).from_config(config).num_parameters()
    if count > _MOST_PARAMETERS:
        raise MemoryError(f"it has {count:,} parameters")
    torch.manual_seed(0)
    model = auto_class(kind).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            # A norm's weight stays near what it is; all else is made up, since some models leave weights as they come.
            is_norm = (
                parameter.ndim == 1
                and bool(parameter.isfinite().all())
                and bool((parameter == 1).all())
            )
            parameter.copy_(noise + 1 if is_norm else noise)
    return model.train()


def tiny_tokens(length: int) -> Tensor:
    """(1, length), the same each time, without special tokens."""
    return torch.randint(
        3, _VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1)
    )


def _has(config: PretrainedConfig, name: str) -> bool:
    return _value(config, name, _WITHOUT) is not _WITHOUT


def _value(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    try:
        return getattr(config, name, default)
    except RuntimeError:  # layers that differ in it have configs of their own
        return getattr(config.per_layer_config[0], name)
