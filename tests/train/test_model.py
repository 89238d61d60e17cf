"""What a run does with the model that its configuration names: RoPE scaling, and files that are not trusted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ringspan.core.errors import ConfigError, RingspanError
from ringspan.torch.model.weights.loading import filled
from ringspan.train.config.load import parse_config
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data.sequences import build_data
from ringspan.train.model import (
    build_model,
    flops_per_token,
    load_model_config,
    load_tokenizer,
    num_matmul_parameters,
    scale_rope,
)
from tests.every_model.hybrids import hybrid_config
from tests.torch.models import build, config

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("rope", "longest", "written"),
    [
        ({"type": "linear", "factor": 4}, 2048, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "dynamic", "factor": 2.0},
            512,
            {"rope_type": "dynamic", "factor": 2.0},
        ),
        (
            {"type": "yarn", "factor": 1.5, "beta_fast": 16.0},
            768,
            {"rope_type": "yarn", "beta_fast": 16.0},
        ),
        (
            {"type": "llama3", "factor": 8},
            4096,
            {"low_freq_factor": 1.0, "original_max_position_embeddings": 512},
        ),
        (
            {"type": "longrope", "factor": 4.0, **FACTORS},
            2048,
            {**FACTORS, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_scaling_is_written_in_the_terms_of_transformers(
    rope: dict[str, Any], longest: int, written: dict[str, Any]
):
    model_config = config("llama")
    theta = model_config.rope_parameters["rope_theta"]
    scale_rope(model_config, rope)
    assert model_config.max_position_embeddings == longest
    assert model_config.rope_parameters["rope_theta"] == theta
    assert written.items() <= model_config.rope_parameters.items()
    assert "type" not in model_config.rope_parameters


@pytest.mark.parametrize(
    ("kind", "rope", "message"),
    [
        ("llama", {"factor": 2.0}, "model.rope.type = None"),
        ("llama", {"type": "yarn"}, "model.rope.factor = None"),
        ("llama", {"type": "longrope", "factor": 2.0}, "long_factor"),
        (
            "gemma3_text",
            {"type": "yarn", "factor": 2.0},
            "no rotary positions that all its layers share",
        ),
    ],
)
def test_scaling_that_cannot_be_is_refused(
    kind: str, rope: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        scale_rope(config(kind), rope)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(r"{marker}").touch()

class OursConfig(LlamaConfig):
    model_type = "ours"

class OursForCausalLM(LlamaForCausalLM):
    config_class = OursConfig
"""


def with_code(folder: Path, marker: Path) -> TrainConfig:
    """A run from a model that comes with Python files of its own."""
    build("llama").save_pretrained(folder)
    (folder / "ours.py").write_text(CODE.format(marker=marker))
    own = {
        "AutoConfig": "ours.OursConfig",
        "AutoModelForCausalLM": "ours.OursForCausalLM",
    }
    change_config(folder, model_type="ours", auto_map=own)
    return run_from(folder)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def run_from(folder: Path, **model: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(folder), **model},
            "data": {"paths": ["x"], "sequence_length_tokens": 8},
        }
    )


def test_code_of_a_model_runs_only_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder, marker = tmp_path / "model", tmp_path / "ran"
    careful = with_code(folder, marker)
    with pytest.raises(
        ConfigError,
        match=r"Python files, which are not run.*model\.trust_remote_code = true",
    ):
        load_model_config(careful)
    assert not marker.exists()
    trusting = run_from(folder, trust_remote_code=True)
    model = build_model(trusting.model, load_model_config(trusting))
    assert type(model).__name__ == "OursForCausalLM" and marker.exists()


def test_weights_in_a_pickle_are_not_opened(tmp_path: Path):
    folder = tmp_path / "model"
    model = build("llama")
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    run = run_from(folder)
    with pytest.raises(ConfigError, match="safetensors"):
        build_model(run.model, load_model_config(run))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (
            "missing",
            {"num_hidden_layers": 3},
            r"has no model\.layers\.2\.\S+ \(9 weights in all\); use the config",
        ),
        (
            "another shape",
            {"vocab_size": 301},
            r"\[\d+, \d+\] there, and \[301, \d+\] in the model; use the config",
        ),
        ("truncated", None, "deserializing"),
    ],
)
def test_weights_that_do_not_make_the_model_are_refused(
    tmp_path: Path, name, spoil, message
):
    folder = tmp_path / name
    build("llama").save_pretrained(folder)
    if spoil is None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        change_config(folder, **spoil)
    run = run_from(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(run.model, load_model_config(run))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_the_model_has_no_place_for_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = build("llama")
    model.save_pretrained(tmp_path)
    change_config(tmp_path, num_hidden_layers=1)
    run = run_from(tmp_path)
    found = build_model(run.model, load_model_config(run))
    with filled(found.lm_head):
        assert torch.equal(found.lm_head.weight, model.lm_head.weight)
    (message,) = (
        record.getMessage()
        for record in caplog.records
        if record.name == "ringspan.train.model"
    )
    assert message.startswith(
        f"model.path = '{tmp_path}': the model has no place for model.layers.1."
    )
    assert message.endswith("(9 weights in all), left out")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("vit", "no causal language model of type vit"), ("rwkv", "rwkv")],
)
def test_a_type_that_is_not_a_causal_model_is_refused_by_name(kind, message):
    settings = {
        "init": "scratch",
        "config": {"model_type": kind, "vocab_size": 300},
        "tokenizer": "train",
    }
    data = {"paths": ["x"], "sequence_length_tokens": 8}
    with pytest.raises(RingspanError, match=message):
        load_model_config(TrainConfig.model_validate({"model": settings, "data": data}))


def test_a_model_that_takes_images_too_is_trained_on_its_text():
    """What is read of its config is what describes its language model."""
    whole, text = config("gemma3"), config("gemma3_text")
    assert not hasattr(whole, "num_attention_heads")
    assert (
        flops_per_token(whole.get_text_config(), 0, 8)
        == flops_per_token(text, 0, 8)
        > 0
    )


def test_layers_without_attention_have_none_of_its_flops():
    # two of its four layers attend, with four heads of eight numbers
    mixed = hybrid_config("qwen3_next")
    assert flops_per_token(mixed, 0, 8) == 12 * (8 / 2) * 2 * 4 * 8
    model, of_text = build("gemma3"), build("gemma3_text")
    assert (
        num_matmul_parameters(model)
        == num_matmul_parameters(of_text)
        < model.num_parameters()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [("a b", None), ("a <image> b", "'<image>', token 6 of model.tokenizer")],
)
def test_a_token_beyond_the_vocabulary_is_named_if_it_occurs(
    tmp_path: Path, words, message
):
    """As of Gemma 3: its models of text have a token for images in the tokenizer alone."""
    known = Tokenizer(
        WordLevel({word: number for number, word in enumerate("abcdef")}, unk_token="f")
    )
    known.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known, eos_token="e", unk_token="f"
    )
    tokenizer.add_special_tokens({"pad_token": "<image>"})
    tokenizer.save_pretrained(tmp_path / "model")
    config("llama", vocab_size=6).save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(f"{words} c d " * 30)
    asked = TrainConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {
                "paths": str(tmp_path / "a.txt"),
                "sequence_length_tokens": 32,
                "documents": "cut",
            },
        }
    )
    found = load_tokenizer(asked.model, load_model_config(asked))
    if message is not None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_data(asked, found, vocabulary=6)
        return
    data = build_data(asked, found, vocabulary=6)
    last = data.train[len(data.train) - 1]
    assert last["input_ids"].max() < 6 and last["shift_labels"][-1] == -100


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path):
    known = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate("abcdefg")}, unk_token="f"
        )
    )
    PreTrainedTokenizerFast(tokenizer_object=known, unk_token="f").save_pretrained(
        tmp_path
    )
    config("llama", vocab_size=6).save_pretrained(tmp_path)
    asked = TrainConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"paths": "a.txt", "sequence_length_tokens": 32},
        }
    )
    with pytest.raises(ConfigError, match="has 7 tokens, the model only 6"):
        load_tokenizer(asked.model, load_model_config(asked))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "empty",
            "model.path = '{path}': has no config.json; give the folder that a model was saved into",
        ),
        ("a.txt", "model.path = '{path}': is a file; give the folder of a.txt"),
        (
            "adapter",
            "model.path = '{path}': is the folder of an adapter; give that of its base model (its/base)",
        ),
        (
            "packed",
            "model.path = '{path}': its files are quantised, and ringspan train reads weights of 16 or 32 bits",
        ),
    ],
)
def test_a_path_of_no_plain_model_says_what_to_give(tmp_path, name, says):
    for folder in ("empty", "adapter", "packed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "its/base"}'
    )
    packed = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    values = config("llama").to_dict() | {"quantization_config": packed}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(values))
    data = {"paths": "a", "sequence_length_tokens": 64}
    asked = parse_config(
        {"model": {"path": str(tmp_path / name)}, "data": data, "adapter": {"rank": 4}}
    )
    with pytest.raises(RingspanError) as caught:
        load_model_config(asked)
    assert (
        says.format(path=tmp_path / name) in str(caught.value)
        and len(str(caught.value)) < 350
    )
