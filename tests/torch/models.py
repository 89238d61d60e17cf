"""Tiny random Hugging Face models and the single-process truth about them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)

import ringspan as rs

_SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


# What a kind has beside these sizes; behind a hyphen, a variant of a model type.
_OPTIONS: dict[str, dict[str, Any]] = {
    "llama-tied": {"tie_word_embeddings": True, "mlp_bias": True},
    "qwen3": {"head_dim": 16},
    "qwen3-window": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 9},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0], "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {  # whose layers differ in their heads, and share keys and values
        "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8, "pad_token_id": 2,
    },
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3},
    "llama4_text": {
        "head_dim": 16, "attention_chunk_size": 9, "no_rope_layers": [1, 0], "floor_scale": 8, "num_local_experts": 2,
        "intermediate_size_mlp": 96, "pad_token_id": 2,
    },
    "deepseek_v3": {
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 24, "q_lora_rank": None,
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "glm_moe_dsa": {  # whose layers share what an index chooses
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 24, "q_lora_rank": 16,
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"],
        "index_topk": 7, "index_head_dim": 12, "index_n_heads": 3,
    },
}  # fmt: skip


def config(kind: str, **changes: Any) -> PretrainedConfig:
    if kind == "gemma3":  # that takes images too
        text = config("gemma3_text", **changes).to_dict()
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        return AutoConfig.for_model(
            kind,
            text_config=text,
            vision_config=vision | {"image_size": 32, "patch_size": 16},
        )
    return AutoConfig.for_model(
        kind.partition("-")[0], **_SIZES | _OPTIONS.get(kind, {}) | changes
    )


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    attention = (
        "eager"
        if kind in ("gpt_oss", "gemma2", "deepseek_v3", "llama4_text", "t5")
        else "sdpa"
    )
    model = auto.from_config(
        config(kind, **changes), attn_implementation=attention
    ).float()
    if kind == "llama4_text":  # its experts are left uninitialised
        for parameter in model.parameters():
            # it does not scale scores: rounding grows twentyfold in a model that has not learnt to
            torch.nn.init.normal_(parameter, std=0.05)
    if kind == "gemma4_text":
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                torch.nn.init.constant_(parameter, len(parameter) ** -0.5)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(
        0, 97, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else whole(p.grad)
        for name, p in model.named_parameters()
    }


def step(model: Any, mesh: DeviceMesh | None = None, length: int = 37) -> Any:
    """Loss and gradients of a model on one process, or on the ring of a mesh."""
    ids = tokens(1, length)
    batch = {"input_ids": ids, "labels": ids}
    loss = model(**(rs.shard_batch(batch, mesh) if mesh else batch)).loss
    loss.backward()
    return loss.detach(), whole_gradients(model)


def check(
    results: list[Any], expected: Any, limits: tuple[float, float] = (1e-6, 1e-5)
) -> None:
    """Each rank's loss and gradients are those expected, within a limit each."""
    for loss, gradients in results:
        assert relative(loss, expected[0]) < limits[0]
        close_by_name(gradients, expected[1], limits[1])


def close_by_name(
    found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5
) -> None:
    """Gradients or weights are those expected, or None alike, in their dtypes."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name] is None) == (wanted is None), name
        assert wanted is None or relative(found[name], wanted) < limit, name
        assert wanted is None or found[name].dtype == wanted.dtype, name


def kept_bytes(module: Any, hidden: Tensor) -> int:
    """Bytes that autograd saves for backward, without parameters."""
    parameters = {p.data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in parameters:
            kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = module(hidden)
        total = sum(kept.values())
    out.sum().backward()
    return total


@contextmanager
def logged(name: str = "ringspan") -> Iterator[list[str]]:
    """Collect the messages of a logger while active, on a rank of the pool too."""
    lines: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def relative(x: Tensor, expected: Tensor) -> float:
    x, expected = x.detach().double(), expected.detach().double()
    error = (x - expected).norm() / expected.norm().clamp_min(1e-30)
    # NaN is below every limit where it is not the first of several
    return float(error.nan_to_num(nan=torch.inf))
