"""Small models like given ones: a layer of each kind, ratios and switches kept."""

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ringspan as rs
from ringspan.proof import small as small_models
from ringspan.proof.small import MOST_PARAMETERS, small_model


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", 2),  # of one kind
        ("gemma3_text", 2),  # with a window and without
        ("deepseek_v3", 2),  # dense and sparse
        ("llama4_text", 2),
        ("qwen3_next", 2),
        ("gemma3n_text", None),
        ("gpt_oss", 2),
    ],
)
def test_each_kind_of_layer_stays(kind, layers):
    config = CONFIG_MAPPING[kind]()
    small = small_model(config)
    assert small.kinds_left_out == 0
    if layers is not None:
        assert small.config.num_hidden_layers == small.layers == layers
    model = AutoModelForCausalLM.from_config(small.config)
    assert model.num_parameters() == small.parameters < MOST_PARAMETERS


@pytest.mark.parametrize(("given", "kept"), [(1, 1), (8, 2), (32, 4)])
def test_ratios_of_heads_stay(given, kept):
    config = CONFIG_MAPPING["llama"](num_attention_heads=32, num_key_value_heads=given)
    small = small_model(config).config
    assert small.num_attention_heads == 4
    assert small.num_key_value_heads == kept


def test_switches_and_scalings_of_a_changed_config_stay():
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
    }
    config = CONFIG_MAPPING["qwen3"](
        tie_word_embeddings=True,
        attention_bias=True,
        attention_dropout=0.1,
        rope_parameters=rope,
        hidden_act="gelu",
    )
    small = small_model(config).config
    assert small.tie_word_embeddings and small.attention_bias
    assert small.hidden_act == "gelu" and small.attention_dropout == 0
    assert small.rope_parameters["factor"] == 4.0
    assert small.rope_parameters["rope_theta"] == 1e6
    assert small.rope_parameters["original_max_position_embeddings"] == 32


def test_a_window_shrinks_and_stays_in_its_layers():
    types = ["full_attention", *["sliding_attention"] * 3]
    config = CONFIG_MAPPING["qwen2"](
        num_hidden_layers=4,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=4096,
        max_window_layers=1,
    )
    small = small_model(config).config
    assert small.layer_types == ["full_attention", "sliding_attention"]
    assert small.sliding_window == 8


@pytest.mark.parametrize(
    "kind",
    [
        "bamba",  # heads of states that add up to a multiple of the hidden size
        "mamba2",
        "bart",  # an encoder-decoder, whose decoder writes
        "longcat_flash",  # experts without weights
        "dots3_note_text",  # heads of two sizes
        "zamba2",
        "hrm_text",  # two stacks of layers, which run in turn
        "zamba",  # a block that several layers share
    ],
)
def test_sizes_that_hang_together_shrink_together(kind):
    small = small_model(CONFIG_MAPPING[kind]())
    assert 1 < small.layers <= 8 and small.parameters < MOST_PARAMETERS


def test_sections_of_a_model_shrink_in_their_places():
    small = small_model(CONFIG_MAPPING["dory"]())
    sections = ("input", "recurrent", "output")
    counts = [getattr(small.config, f"n_{name}_layers") for name in sections]
    assert sum(counts) == small.config.num_hidden_layers and min(counts) > 0
    assert small.config.n_recurrent_loops == 2


def test_a_small_head_rotates_the_part_that_latents_have():
    small = small_model(CONFIG_MAPPING["mistral4"]()).config
    share = small.rope_parameters["partial_rotary_factor"]
    assert share * small.head_dim == small.qk_rope_head_dim < small.head_dim


def test_rotary_axes_share_half_a_small_head():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    config = CONFIG_MAPPING["qwen2_vl_text"](rope_parameters=rope)
    small = small_model(CONFIG_MAPPING["qwen2_vl"](text_config=config.to_dict()))
    text = small.config.get_text_config()
    heads = text.hidden_size // text.num_attention_heads
    assert sum(text.rope_parameters["mrope_section"]) == heads // 2


def not_made(*_: object, **__: object) -> None:
    raise ValueError("sizes that do not fit")


def test_without_small_towers_a_language_model_is_left(monkeypatch):
    monkeypatch.setattr(small_models, "small_seeing", not_made)
    config = CONFIG_MAPPING["qwen3_5"]()
    small = small_model(config)
    assert type(small.config) is type(config.text_config) and small.layers == 2


def test_a_type_that_is_not_made_small_says_so(monkeypatch):
    monkeypatch.setattr(small_models, "_with_layers", not_made)
    said = "cannot be made small: sizes that do not fit; please open an issue"
    with pytest.raises(rs.UnsupportedError, match=said):
        small_model(CONFIG_MAPPING["llama"]())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("blt", "is no language model of layers"),
        ("xlm", "computes attention in its own code"),
        ("pix2struct", "is an encoder-decoder model"),
    ],
)
def test_what_a_ring_refuses_at_any_size_is_the_reason(kind, why):
    with pytest.raises(rs.UnsupportedError, match=why):
        small_model(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize("kind", ["bart", "qwen3_next"])
def test_size_alone_is_no_reason_of_a_ring(monkeypatch, kind):
    monkeypatch.setattr(small_models, "_with_layers", not_made)
    with pytest.raises(rs.UnsupportedError, match="cannot be made small"):
        small_model(CONFIG_MAPPING[kind]())


def test_a_config_that_transformers_makes_no_model_of_says_so():
    config = CONFIG_MAPPING["nemotron"]()  # without a size of heads
    with pytest.raises(rs.UnsupportedError, match="makes no model of this config"):
        small_model(config)
