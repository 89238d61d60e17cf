"""A model type as ``ringspan prove`` judges it: what docs/models.md says of it is what a user's command would."""

import time
from itertools import cycle, islice
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
)

import ringspan as rs
from ringspan.core.messages.lines import one_line
from ringspan.proof.run import NOT_TRIED, Asked, Proof, prove_on
from ringspan.torch.model.layers.decoder import text_config
from tests.every_model.tiny import MULTIMODAL
from tests.pool import Pool

RANKS: Final = 2
_DECODER: Final = {"is_decoder": True}
_WINDOW: Final = {"sliding_window": 4096}
_SLIDING: Final = {"use_sliding_window": True, "max_window_layers": 1}


def _in_turn(*types: str, layers: int) -> dict[str, list[str]]:
    return {"layer_types": [*islice(cycle(types), layers)]}


def _dense_first(layers: int) -> dict[str, list[str]]:
    return {"mlp_layer_types": ["dense", *["sparse"] * (layers - 1)]}


_BOTH: Final = ("full_attention", "sliding_attention")
_DENSE: Final = {"mlp_only_layers": [0]}
_SCALED: Final = {"logits_scaling": 8.0, "attention_multiplier": 0.1}
_HEADS: Final = {"head_dim": 128}
_CODES: Final = {"vocabulary_map": {"<image>": 8197}}
_SLIDING_ROPE: Final = {
    "layer_types": ["full_attention", "sliding_attention"] * 20,
    "rope_parameters": {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_EXPERTS: Final = {
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_OCR: Final = {
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", *["sparse"] * 31],
}
_INDEXED: Final = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "ple_layer_ids": [1, 3],
    "eos_token_id": 5,
}
# Fields that a type's usual config lacks, without which transformers makes no language model of it, and fields that
# give it further kinds of layers: windows, dense feed-forwards, scalings.
FIELDS: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("chameleon", "emu3"), _CODES),
    "cohere_compass": {"text_config": _SLIDING_ROPE},
    "cohere_compass_text": _SLIDING_ROPE,
    "deepseek_ocr2": {"text_config": _OCR},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "diffusion_gemma": {"text_config": _EXPERTS},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    }
    | _in_turn(*_BOTH, layers=62),
    **dict.fromkeys(("granite", "granitemoe", "granite_swa"), _SCALED),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _HEADS),
    "granite4_vision": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "hunyuan_vl": {"text_config": _HEADS},
    "cohere2_moe": _dense_first(40),
    "laguna": _in_turn(*_BOTH, layers=40),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), _in_turn("conv", "full_attention", layers=32)
    ),
    "mellum": _in_turn(*_BOTH, layers=28) | _dense_first(28),
    "minimax_m3_vl_text": _in_turn("full_attention", "minimax_m3_sparse", layers=60)
    | _dense_first(60),
    "ministral": _HEADS | _in_turn(*_BOTH, layers=32),
    **dict.fromkeys(("mixtral", "phi3", "starcoder2"), _WINDOW),
    "xmod": {"default_language": "en_XX"},
    "nemotron": _HEADS | {"num_key_value_heads": 8},
    **dict.fromkeys(("qwen2", "qwen3"), _SLIDING),
    "smollm3": _WINDOW | _SLIDING | _in_turn(*_BOTH, layers=36),
    "step3p7": {"text_config": _WINDOW | _in_turn(*_BOTH, layers=45)},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "flint"), _SLIDING | _DENSE),
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
}
# What a proof says of a config that it makes no small model of.
UNTRIED: Final = (
    "transformers makes no model of this config",
    "transformers has no language model of it",
    "does not run in transformers by itself",
    "when made small",
    "cannot be made small",
)
# Options that a type needs.
_KEPT: Final = {"checkpoint": "none"}
_WITHOUT_CHECKPOINT: Final = (
    "ctrl gpt_neox_japanese granite_speech granite_speech_plus jetmoe openai-gpt"
)
OPTIONS: Final = dict.fromkeys(_WITHOUT_CHECKPOINT.split(), _KEPT)


def proven_config(kind: str) -> PretrainedConfig:
    """Return the usual config of a model type, of a decoder and complete."""
    name = kind.removesuffix(MULTIMODAL)
    make, changes = CONFIG_MAPPING[name], FIELDS.get(name, {})
    if hasattr(make(), "is_decoder"):
        changes = changes | _DECODER
    config = make(**changes)
    if kind.endswith(MULTIMODAL):
        return config
    # Many types have a class for the language model alone, which is another type's too. An encoder-decoder's own config
    # says what its decoder is; the one of its text has other names for that.
    text, classes = text_config(config), MODEL_FOR_CAUSAL_LM_MAPPING
    is_text = type(text) in classes and classes[type(text)] is classes[type(config)]
    is_own = type(text) is type(config)
    return text if is_text and not is_own else config


def prove_kind(mesh: DeviceMesh, kind: str) -> tuple[Proof, float]:
    """Return a type's proof and the seconds that this rank's processor took, which other programs do not lengthen."""
    options = OPTIONS.get(kind.removesuffix(MULTIMODAL), {})
    asked = Asked(config=proven_config(kind), name=kind, options=options)
    started = time.process_time()
    return prove_on(mesh, asked), time.process_time() - started


def judge_proof(pool: Pool, kind: str) -> dict[str, Any]:
    """Return what a proof says of a type: its worst error and that of generation, or why there are none."""
    try:
        proven_config(kind)
    except Exception as error:  # its usual config is none
        return {"untried": said(error)}
    try:
        outcomes = pool.outcomes(prove_kind, RANKS, kind)
    except TimeoutError as error:  # the pool starts new ranks
        outcomes = [error]
    first = next((each for each in outcomes if isinstance(each, BaseException)), None)
    if first is None:
        proof, _ = outcomes[0]
        seconds = max(seconds for _, seconds in outcomes)
        return _found(proof) | {"processor_seconds": round(seconds, 1)}
    message = one_line(first)
    if isinstance(first, rs.UnsupportedError):
        is_untried = any(words in message for words in UNTRIED)
        return {"untried" if is_untried else "refused": message}
    pool.restart()
    return {"failed": f"{type(first).__name__}: {message}"}


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"[:200]


def _found(proof: Proof) -> dict[str, Any]:
    """Return a proof's verdict, its worst error, and the batches that a type refuses, generation among them."""
    worst = max(proof.rows, key=lambda row: row.error or 0.0)
    found = {
        "exact": proof.is_exact,
        "error": worst.error,
        "of": f"{worst.of} ({worst.batch})",
        "layers": proof.layers,
        "not_taken": {row.batch: row.refused for row in proof.rows if row.refused},
        "not_tried": [each for each in proof.not_tried if each not in NOT_TRIED],
    }
    wrong = [row for row in proof.rows if not row.is_exact]
    if wrong:
        found["wrong"] = [f"{row.batch}: {row.place or row.of}" for row in wrong]
    return found
