"""Tiny models of the kinds of attention that a cache has to know."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
# An index that chooses fewer keys than a prompt has; of so many heads that no two scores are equal.
_INDEXED = {
    **_MLA, "index_topk": 9, "index_n_heads": 24, "index_head_dim": 8, "head_dim": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
}  # fmt: skip
CONFIGS = {
    "llama": {}, "qwen3": {"tie_word_embeddings": True}, "mistral": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        **_MLA, "head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 2,
    },
    "deepseek_v32": {**_INDEXED, "first_k_dense_replace": 2},
    "glm_moe_dsa": {
        **_INDEXED, "indexer_types": ["full", "shared"] * 2, "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "minimax_m3_vl_text": {
        "head_dim": 8, "rotary_dim": 4, "dense_intermediate_size": 48, "shared_intermediate_size": 16,
        "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 8,
        "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": True, "floor_scale": 4, "num_local_experts": 2,
        "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
    },
}  # fmt: skip


def model(name: str, **changes: object) -> AutoModelForCausalLM:
    """A tiny model with random weights, the same at every call."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **{**_SMALL, **CONFIGS[name], **changes})
    # larger than usual, so that attention is not nearly uniform
    made = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa" if name != "gpt_oss" else "eager"
    ).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return made


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        1, 97, (batch, length), generator=torch.Generator().manual_seed(seed + length)
    )
