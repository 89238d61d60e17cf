"""Tiny configs of models with a state, convolutions or an index, which give their sizes names of their own."""

from typing import Any, Final

from transformers import CONFIG_MAPPING
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

DROPOUTS: Final = (
    "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "activation_dropout", "layerdrop", "residual_dropout", "embedding_dropout",
    "router_jitter_noise",
)  # fmt: skip
_ALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
_GATED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_MAMBA2 = {
    "mamba_d_state": 6,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SHARING = {
    "layers_block_type": [
        "linear_attention",
        "hybrid",
        "hybrid",
        "linear_attention",
        "hybrid",
    ],
    "num_hidden_layers": 5,
    "head_dim": None,
}
_SELECTIVE = {"state_size": 5, "time_step_rank": 4, "expand": 2}

# What a kind has beside these sizes: at least two layers of each sort.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _GATED | _EXPERTS | {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_5_text": _GATED,
    "kimi_linear": {
        "linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": None, "first_k_dense_replace": 2,
        "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    } | _MIXED,
    "olmo_hybrid": _GATED,
    "qwen3_5_moe_text": _GATED | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "mlp", "moe"] * 2,
        "num_hidden_layers": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8,
    },
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64, "num_hidden_layers": 2},
    "granitemoehybrid": _MAMBA2 | _MIXED | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16, "logits_scaling": 8.0,
        "attention_multiplier": 0.1,
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 2,
    },
    "mamba": _SELECTIVE | {"num_hidden_layers": 2, "intermediate_size": 64},
    "jamba": {
        "mamba_d_state": 5, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
    },
    "falcon_mamba": _SELECTIVE | {"num_hidden_layers": 2, "intermediate_size": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba": _SHARING | {"mamba_d_state": 5, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": _SHARING | {  # the third block is the first again, with adapters of its own
        "num_key_value_heads": 4, "mamba_d_state": 6, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8,
        "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4, "use_mem_rope": True,
    },
    "minimax": _MIXED | {"block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 2},
}  # fmt: skip


_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10,
    "v_head_dim": 6, "index_topk": 7, "index_head_dim": 12, "index_n_heads": 3, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_SHARED = _LATENT | {
    "indexer_types": ["full", "shared"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
}
_UNGROUPED = {
    "first_k_dense_replace": 2,
    "n_group": None,
    "topk_group": None,
    "gated_norm_rank": 4,
}
_SLIDING = {
    "num_hidden_layers": 6, "layer_types": ["indexed_attention", "sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "dense", *["sparse"] * 4], "head_dim": 18, "sliding_window": 6,
    "shared_experts_intermediate_size": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16, "swa_kv_lora_rank": 12, "swa_head_dim": 18, "swa_qk_nope_head_dim": 10, "swa_v_head_dim": 8,
}  # fmt: skip
# Models whose queries attend to the keys that an index chooses: fewer than a test's tokens.
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": _LATENT | {"first_k_dense_replace": 2},
    "glm_moe_dsa": _SHARED,
    "hy_v4": _SHARED | {"hc_mult": 2},
    "axk2": _LATENT | _UNGROUPED,
    "dots3_note_text": _LATENT | _SLIDING,
    "minimax_m3_vl_text": _EXPERTS | {
        "rotary_dim": 4, "dense_intermediate_size": 48, "shared_intermediate_size": 16, "num_local_experts": 4,
        "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 3,
        "index_local_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "qwen4_exp_text": _GATED | _EXPERTS | {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "shared_expert_intermediate_size": 16,
        "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 8, "indexer_compress_ratio": 4, "ple_layer_ids": [1, 3], "ple_embed_dim": 16,
        "eos_token_id": 5, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
        "ple_conv_kernel_size": 3,
    },
    "deepseek_v4": {
        "num_hidden_layers": 6, "num_key_value_heads": 1, "q_lora_rank": 16, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 3,
        "index_head_dim": 12, "index_topk": 3, "sliding_window": 5, "hc_mult": 2, "partial_rotary_factor": 0.5,
        "hc_sinkhorn_iters": 4, "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 4},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"] * 2,
    },
}  # fmt: skip
# Others that compress keys and values, and attend to all of them.
LATENT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3"), _LATENT | {"first_k_dense_replace": 2}
    ),
    **dict.fromkeys(("glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), _LATENT),
}
# Those that transformers has only below a model that sees.
SEEING_INDEXED: dict[str, dict[str, Any]] = {
    "mistral_large4_text": _LATENT | {
        "indexer_types": ["full", "shared"] * 2, "no_rope_layers": [1, 0] * 2, "kv_source_layers": [0, 1, 0, 1],
        "first_k_dense_replace": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 8,
    },
    "glm5_next_text": _LATENT | {
        "num_hidden_layers": 6, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"] * 2,
        "indexer_types": ["full", "full", "shared"] * 2, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
        "qk_rope_head_dim": 0, "index_topk": 8, "index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 4,
        "hc_mult": 2, "hc_sinkhorn_iters": 4,
    },
    "hy_v4_vl_text": _SHARED | {
        "hc_mult": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
}  # fmt: skip


def hybrid_config(kind: str, **changes: Any) -> Any:
    """Tiny sizes, at least two layers of each sort and no dropout."""
    usual = CONFIG_MAPPING[kind]()
    usual.allow_global_per_layer_attribute_access = True
    values = {name: value for name, value in _ALL.items() if hasattr(usual, name)}
    values |= {name: 0.0 for name in DROPOUTS if hasattr(usual, name)}
    # older transformers
    values |= (HYBRIDS | INDEXED | LATENT | SEEING_INDEXED)[kind] | changes
    if "layer_types" in values and "indexed_attention" not in ALLOWED_LAYER_TYPES:
        older = f"{'qwen' if kind.startswith('qwen') else 'deepseek'}_sparse_attention"
        values["layer_types"] = [
            older if each == "indexed_attention" else each
            for each in values["layer_types"]
        ]
    made = CONFIG_MAPPING[kind](
        **{name: value for name, value in values.items() if value is not None}
    )
    # others know no float64
    made._attn_implementation = made._experts_implementation = "eager"
    return made
