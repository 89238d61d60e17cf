"""A folder's own weights: the layers that are kept, in full width."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)

import ringspan as rs
from ringspan.proof.own_weights import OwnWeights, refuse_too_large
from ringspan.proof.run import Proof, prove
from ringspan.proof.small import FEW_TOKENS, small_model
from ringspan.proof.trial import Subject
from tests.cases import long


def written(folder: Path, kind: str, **sizes: Any) -> Any:
    usual: dict[str, Any] = {
        "hidden_size": 80,
        "intermediate_size": 112,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 1111,
        "num_hidden_layers": 6,
    }
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**usual | sizes))
    model.save_pretrained(folder)
    return model


MIXED = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "num_key_value_heads": 5,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "sizes", "kept"),
    [
        ("gemma3_text", {"tie_word_embeddings": True}, (0, 5)),
        ("deepseek_v3", MIXED, (0, 3)),
    ],
)
def test_the_kept_layers_have_the_numbers_of_the_files(tmp_path, kind, sizes, kept):
    full = written(tmp_path, kind, **sizes)
    small = small_model(full.config, is_narrow=False)
    assert small.kept == kept
    weights = OwnWeights(str(tmp_path), full.config, small.kept)
    found = Subject(config=small.config, weights=weights).make(torch.float64)
    assert found.config.hidden_size == 80
    assert found.config.vocab_size == FEW_TOKENS
    expected = full.state_dict()
    for name, tensor in found.state_dict().items():
        for place, layer in enumerate(kept):
            name = name.replace(f"layers.{place}.", f"layers.[{layer}].")
        truth = expected[name.replace("[", "").replace("]", "")]
        assert torch.equal(tensor.float(), truth[: len(tensor)]), name


def proven(mesh: Any, folder: Path, config: Any) -> Proof:
    return prove(config, mesh, weights=str(folder), layout="striped")


def test_own_weights_are_exact(pool, tmp_path):
    config = written(tmp_path, "gemma3_text").config
    for proof in pool.run(proven, 2, tmp_path, config):
        assert proof.is_exact, proof.as_json()
        assert proof.weights == str(tmp_path)
        assert f"first {FEW_TOKENS} of the vocabulary" in proof.not_tried[0]


TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}


def written_around(folder: Path, kind: str, vision: dict[str, Any]) -> Any:
    """Write a model that sees."""
    text = CONFIG_MAPPING[kind]().get_text_config().to_dict() | {
        "hidden_size": 80,
        "intermediate_size": 112,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "vocab_size": 1111,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=vision)
    torch.manual_seed(2)
    model = AutoModelForMultimodalLM.from_config(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "vision"),
    [
        ("llava", TOWER),  # its images are tried too
        *long(("video_llava", TOWER)),
    ],
)
def test_own_weights_of_a_language_model_that_sees_are_exact(
    pool, tmp_path, kind, vision
):
    full = written_around(tmp_path, kind, vision)
    config = full.config
    for proof in pool.run(proven, 2, tmp_path, config):
        assert proof.is_exact, proof.as_json()
        assert any("its towers" in each for each in proof.not_tried)
    small = small_model(config, is_narrow=False)
    weights = OwnWeights(str(tmp_path), config, small.kept)
    found = Subject(config=small.config, weights=weights).make(torch.float64)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    expected = full.state_dict()[name]
    assert torch.equal(found.state_dict()[name].float(), expected)


def too_large(mesh: Any) -> str:
    with pytest.raises(rs.ConfigError) as raised:
        refuse_too_large(mesh, 10**13, "weights='large'")
    return str(raised.value)


def test_weights_that_do_not_fit_are_refused_with_the_gigabytes(pool):
    for message in pool.run(too_large, 2):
        assert "2 ranks take 1440000 GB for 10,000,000,000,000 weights" in message
        assert "use fewer ranks" in message
