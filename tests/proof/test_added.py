"""What is added to a model: adapters, packed weights, Python files of its own, attention implementations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import ringspan as rs
from ringspan.proof.run import Proof, prove
from ringspan.proof.small import small_model
from tests.cases import long
from tests.proof.remote import write_remote

NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
INT8 = {"load_in_8bit": True, "llm_int8_threshold": 0.0}


def lora(**options: Any) -> LoraConfig:
    usual = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"}
    return LoraConfig(**usual | options)


def proven(mesh: Any, packed: dict[str, Any] | None, options: dict[str, Any]) -> Proof:
    config = CONFIG_MAPPING["llama"]()
    if packed is not None:
        config.quantization_config = packed
    return prove(config, mesh, **options)


@pytest.mark.parametrize(
    ("packed", "options"),
    [
        (None, {"adapter": lora(use_rslora=True, lora_dropout=0.1)}),
        (NF4, {"adapter": lora(), "layout": "striped"}),
        *long(
            (INT8, {"adapter": lora()}),
            (None, {"adapter": lora(use_dora=True)}),
            (None, {"adapter": IA3Config(task_type="CAUSAL_LM")}),
            (NF4, {"adapter": lora(), "dtype": torch.bfloat16}),
        ),
    ],
)
def test_adapters_are_exact_over_plain_and_packed_weights(pool, packed, options):
    for proof in pool.run(proven, 2, packed, options):
        assert proof.is_exact, proof.as_json()
        assert all(not row.refused for row in proof.rows)
        dtype = str(
            options.get("dtype", torch.float64 if packed is None else "float32")
        )
        assert {row.dtype for row in proof.rows} == {dtype.removeprefix("torch.")}
        worst = " ".join(row.of for row in proof.rows)
        assert "lora_" in worst or "ia3" in worst


def test_dropout_of_an_adapter_is_named(pool):
    options = {"adapter": lora(lora_dropout=0.1)}
    for proof in pool.run(proven, 1, None, options):
        assert "lora_dropout=0.1" in proof.not_tried


def refused(mesh: Any, packed: dict[str, Any], options: dict[str, Any]) -> str:
    with pytest.raises(rs.RingspanError) as raised:
        proven(mesh, packed, options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("packed", "options", "said"),
    [
        (NF4, {}, "add an adapter"),
        ({"quant_method": "gptq"}, {"adapter": lora()}, "is of gptq"),
        (NF4, {"adapter": lora(), "dtype": torch.float64}, "use float32 or bfloat16"),
    ],
)
def test_packed_weights_that_do_not_train_are_refused(pool, packed, options, said):
    for message in pool.run(refused, 1, packed, options):
        assert said in message


def with_own_code(mesh: Any, folder: Path) -> Proof:
    return prove(AutoConfig.from_pretrained(folder, trust_remote_code=True), mesh)


def test_a_model_of_python_files_is_exact(pool, tmp_path):
    for proof in pool.run(with_own_code, 2, write_remote(tmp_path / "gated")):
        assert proof.is_exact, proof.as_json()
        assert max(row.error for row in proof.rows) < 1e-12


def of_models(mesh: Any) -> tuple[Proof, Proof]:
    config = small_model(CONFIG_MAPPING["llama"]()).config
    adapted = get_peft_model(AutoModelForCausalLM.from_config(config), lora())
    config._attn_implementation = "flash_attention_2"
    return prove(adapted, mesh), prove(config, mesh)


def test_a_model_brings_its_adapter_and_its_attention(pool):
    for adapted, other in pool.run(of_models, 1):
        assert "lora_" in adapted.rows[0].of
        assert any("flash_attention_2" in each for each in other.not_tried)


def of_a_classifier(mesh: Any) -> Proof:
    config = small_model(CONFIG_MAPPING["llama"]()).config
    return prove(AutoModelForSequenceClassification.from_config(config), mesh)


def test_a_head_that_is_not_tried_is_named(pool):
    for proof in pool.run(of_a_classifier, 1):
        assert any("LlamaForSequenceClassification" in e for e in proof.not_tried)
