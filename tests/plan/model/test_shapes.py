"""Parameter counts against the published totals, and against what transformers builds."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ringspan.core.errors import ConfigError, RingspanError, UnsupportedError
from ringspan.plan.cost.chosen import attended_pairs
from ringspan.plan.model.configs import MODELS, from_config, model_shape
from ringspan.torch.model.layers.decoder import layer_kinds
from ringspan.torch.model.layers.positions import num_trained_positions
from tests.cases import few
from tests.every_model.hybrids import hybrid_config
from tests.plan.models import FILE, row_of
from tests.torch import models

# Counted from the published checkpoints (their safetensors index); GPT-3 from its paper's sizes (Brown et al. 2020).
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt-175b": 174_604_259_328, "llama-3b": 3_426_473_600, "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672, "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}  # fmt: skip


def test_every_built_in_model_has_its_published_parameters():
    assert {name: MODELS[name].parameters for name in PUBLISHED} == PUBLISHED
    billions = {
        name: round(shape.parameters / 1e9, 1)
        for name, shape in MODELS.items()
        if name not in PUBLISHED
    }
    assert billions == {
        "llama-3.3-70b": 70.6,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235.1,
        "qwen3.5-0.8b": 0.8,
        "qwen3.5-2b": 1.9,
        "qwen3.5-4b": 4.2,
        "qwen3.5-9b": 9.0,
        "qwen3.5-27b": 26.9,
        "qwen3.5-35b-a3b": 34.7,
        "qwen3.5-122b-a10b": 122.1,
        "qwen3.5-397b-a17b": 396.3,
        "gpt-oss-20b": 20.9,
        "gpt-oss-120b": 116.8,
        "deepseek-v3": 671.0,
        "minimax-m2": 228.7,
        "glm-4.5-air": 106.9,
        "glm-5": 743.9,
        "gemma-3-1b": 1.0,
        "gemma-3-4b": 3.9,
        "gemma-3-12b": 11.8,
        "gemma-3-27b": 27.0,
        "gemma-4-e2b": 4.6,
        "gemma-4-e4b": 7.5,
        "gemma-4-31b": 30.7,
        "gemma-4-26b-a4b": 25.2,
        "mistral-small-24b": 23.6,
        "nemotron-3-nano-30b-a3b": 31.6,
        "nemotron-3-super-120b-a12b": 120.7,
    }


@pytest.mark.parametrize("name", few(MODELS, 5))
def test_a_built_in_model_is_counted_as_its_config_is(name):
    row = json.loads(FILE.read_text())[name]
    assert (
        json.loads(json.dumps(row_of(from_config(row["config"], name)))) == row["shape"]
    )


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *((kind, {}) for kind in ("llama", "mistral", "qwen2", "qwen3")),
        ("llama", {"max_position_embeddings": 1234}),
        ("llama", {"max_position_embeddings": 1234, "rope_parameters": DYNAMIC}),
        (
            "llama",
            {
                "max_position_embeddings": 1234,
                "rope_scaling": {"type": "dynamic", "factor": 2.5},
            },
        ),
        (
            "qwen3",
            {
                "max_position_embeddings": 1234,
                "rope_parameters": {**DYNAMIC, "rope_type": "linear"},
            },
        ),
    ],
)
def test_a_model_has_the_positions_that_generate_reads(tmp_path, kind, values):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
    }
    sizes |= {"num_key_value_heads": 4}
    written = {"model_type": kind, **sizes, "vocab_size": 11, **values}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    assert model_shape(str(tmp_path)).made_for == num_trained_positions(config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "head_dim": 24}),
        ("llama-tied", {}),
        ("qwen3", {}),
        ("qwen3-window", {}),
        ("mistral-window", {}),
        ("qwen2", {}),
        (
            "gpt2",
            {
                "n_embd": 60,
                "n_layer": 3,
                "n_head": 4,
                "n_positions": 77,
                "vocab_size": 101,
            },
        ),
    ],
)
def test_a_config_has_the_parameters_and_windows_of_its_model(tmp_path, kind, changes):
    config = (
        AutoConfig.for_model("gpt2", **changes)
        if kind == "gpt2"
        else models.config(kind, **changes)
    )
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    shape = model_shape(str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert shape.parameters == model.num_parameters()
    assert shape.matrix_parameters == sum(module.weight.numel() for module in linear)
    assert shape.layer_masks == layer_kinds(config)


def test_a_hub_id_of_a_built_in_model_needs_no_network():
    assert (
        model_shape("meta-llama/Llama-3.1-8B-Instruct").parameters
        == PUBLISHED["llama-3.1-8b"]
    )
    assert (
        model_shape("meta-llama/Meta-Llama-3.1-8B").parameters
        == PUBLISHED["llama-3.1-8b"]
    )
    assert model_shape("Qwen/Qwen3-0.6B").parameters == PUBLISHED["qwen3-0.6b"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("lama-7b", ConfigError, "did you mean llama-7b"),
        ("zzz", ConfigError, "known are gpt2"),
        ("{folder}/none.json", ConfigError, "none.json"),
        ("{folder}/list.json", ConfigError, "has no model_type of transformers"),
        ("{folder}/broken.json", ConfigError, "not valid JSON"),
        ("{folder}/t5.json", UnsupportedError, "model_type='t5'"),
        ("{folder}/bamba.json", ConfigError, "builds no bamba model"),
        ("{folder}/heads.json", UnsupportedError, "num_key_value_heads=3"),
        (
            "{folder}/packed.json",
            UnsupportedError,
            r"is quantised \(torchao\); plan the model .*--lora 16 --weights int8",
        ),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, name, error, message):
    llama = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5"}))
    (tmp_path / "bamba.json").write_text(
        json.dumps({"model_type": "bamba", "num_hidden_layers": "two"})
    )
    (tmp_path / "packed.json").write_text(
        json.dumps({**llama, "quantization_config": {"quant_method": "torchao"}})
    )
    (tmp_path / "heads.json").write_text(
        json.dumps({**llama, "hidden_size": 8, "num_key_value_heads": 3})
    )
    with pytest.raises(error, match=message):
        model_shape(name.format(folder=tmp_path))


def test_a_path_that_is_there_is_no_id_of_the_hub(tmp_path):
    (tmp_path / "config").write_text("{}")
    cases = {
        "/dev/zero": "cannot be read .a pipe or a device",
        tmp_path / "config": "has no model_type of transformers",
    }
    for path, message in cases.items():
        with pytest.raises(RingspanError, match=message):
            model_shape(str(path))


def test_an_index_chooses_as_many_keys_as_its_config_says():
    kinds = from_config(
        hybrid_config("deepseek_v32", index_topk=2048).to_dict(), "tokens"
    ).kinds
    assert {(kind.index.topk, kind.index.kept) for kind in kinds if kind.index} == {
        (2048, 2048)
    }
    (blocks,) = {
        kind.index
        for kind in from_config(
            hybrid_config("minimax_m3_vl_text").to_dict(), "blocks"
        ).kinds
        if kind.index
    }
    assert (blocks.topk, blocks.size) == (3, 4)
    kinds = from_config(hybrid_config("deepseek_v4").to_dict(), "entries").kinds
    # of a query, which attends to a window of 5, and 3 entries of 3 tokens or all of 4
    seen = range(1, 62)
    pairs = [
        sum(
            min(n, 5) + most
            for n in seen
            for most in [min(n // size, 3 if size == 3 else n)]
        )
        for size in (4, 3)
    ]
    assert [attended_pairs(kind.index, 61) for kind in kinds if kind.index] == 2 * pairs
