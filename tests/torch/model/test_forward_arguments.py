"""What a caller, a config or a layer asks for, and a model on a ring does not do, raises on every rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.torch.model.config_changes import check_configs, copy_configs
from ringspan.torch.model.forward_arguments import (
    FIXED,
    REFUSED,
    check_arguments,
    check_attention,
)
from tests.every_model.tiny import tiny_config, tiny_model
from tests.torch.models import build, relative, tokens


def call_with(mesh: DeviceMesh, arguments: dict[str, Any]) -> Any:
    model = rs.parallelize(build("llama"), mesh)
    ids = tokens(1, 16)
    return model(
        **rs.shard_batch({"input_ids": ids, "labels": ids}, mesh), **arguments
    ).loss.detach()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"is_causal": False},
            "is_causal=False is not supported on a ring; it must be True",
        ),
        (
            {"output_router_logit": True},
            r"'output_router_logit', did you mean 'output_router_logits'\?",
        ),
        ({"lables": None}, "does not take 'lables'"),
        ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep=a Tensor"),
    ],
)
def test_an_argument_that_would_be_dropped_raises(arguments, message):
    with pytest.raises(rs.UnsupportedError, match=message):
        check_arguments("Model", arguments)


def test_an_argument_that_would_be_dropped_raises_on_every_rank(pool):
    for outcome in pool.outcomes(call_with, 2, {"max_length_q": 16}):
        assert isinstance(
            outcome, rs.UnsupportedError
        ) and "pack documents with position_ids" in str(outcome)


def test_an_unknown_argument_raises_whatever_its_value():
    with pytest.raises(
        rs.UnsupportedError,
        match=r"Model\.forward does not take 'num_item_in_batch', did you mean",
    ):
        check_arguments("Model", {"num_item_in_batch": None})


def test_the_defaults_of_all_arguments_change_nothing(pool):
    defaults = FIXED | dict.fromkeys(REFUSED)
    for plain, given in zip(
        pool.run(call_with, 2, {}), pool.run(call_with, 2, defaults), strict=True
    ):
        assert torch.equal(plain, given)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_refused_argument_says_what_to_do(name):
    for value in (torch.zeros(1), 1, True, "x"):
        with pytest.raises(
            rs.UnsupportedError,
            match=rf"^{name} is not supported on a ring; .*(leave it out|rs\.)",
        ):
            check_arguments("Model", {name: value})


def after_parallelize(mesh: DeviceMesh, changes: dict[str, Any]) -> Any:
    model = rs.parallelize(build("llama"), mesh)
    ids = tokens(1, 16)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    before = model(**batch).loss.detach()
    vars(model.config).update(changes)
    return before, model(**batch).loss.detach()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            {"output_hidden_states": True},
            "output_hidden_states of llama was changed from False to True",
        ),
        ("llama", {"return_dict": False}, "return_dict"),
        (
            "llama",
            {"attention_dropout": 0.1},
            "attention_dropout of llama was changed from 0.0 to 0.1",
        ),
        ("llama", {"_attn_implementation": "eager"}, "attn_implementation"),
        (
            "llama",
            {"sliding_window": 4},
            "sliding_window of llama was changed from None to 4",
        ),
        ("llama", {"is_causal": False}, "is_causal"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters",
        ),
        (
            "mistral",
            {"sliding_window": 4},
            "sliding_window of mistral was changed from 8 to 4",
        ),
        (
            "gemma4_text",
            {"sliding_window": 5},
            "sliding_window of gemma4_text was changed from 8 to 5",
        ),
        (
            "gemma4",
            {"sliding_window": 5},
            "sliding_window of gemma4.text_config was changed from 8 to 5",
        ),
    ],
)
def test_a_config_that_is_changed_afterwards_raises(kind, changes, message):
    config = tiny_config(kind)
    copies = copy_configs((config, config.get_text_config()))
    check_configs(copies)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    with pytest.raises(
        rs.UnsupportedError, match=rf"config\.{message}.* after rs\.parallelize"
    ):
        check_configs(copies)


def test_a_config_changed_later_raises_on_every_rank(pool):
    for outcome in pool.outcomes(after_parallelize, 2, {"return_dict": False}):
        assert isinstance(outcome, rs.UnsupportedError) and "config.return_dict" in str(
            outcome
        )


def test_what_a_trainer_sets_in_a_config_changes_nothing(pool):
    changes = {
        "use_cache": True,
        "pad_token_id": 3,
        "eos_token_id": 1,
        "my_own_note": "x",
        "output_attentions": False,
    }
    for before, after in pool.run(after_parallelize, 2, changes):
        assert torch.equal(before, after)


class Attention(nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_causal": False}, "is_causal=False"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q"),
        ({"block_indices": torch.zeros(2)}, "block_indices"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"attention_mask": torch.zeros(2)}, "attention_mask"),
        ({"output_attentions": True}, "output_attentions=True"),
        (
            {"alibi_slopes": torch.zeros(2)},
            "gives attention alibi_slopes, which the ring does not know",
        ),
    ],
)
def test_a_layer_request_that_the_ring_lacks_raises(arguments, message):
    check_attention(
        Attention(), {name: None for name in arguments if name != "alibi_slopes"}
    )
    with pytest.raises(rs.UnsupportedError, match=message):
        check_attention(Attention(), arguments)


def test_attention_that_sees_later_tokens_raises():
    module = Attention()
    module.is_causal = False
    with pytest.raises(rs.UnsupportedError, match="its tokens see later ones"):
        check_attention(module, {})


def windowed(mesh: DeviceMesh, layer: int, window: int | None) -> None:
    model = build("qwen3-window")
    model.model.layers[layer].self_attn.sliding_window = window
    model = rs.parallelize(model, mesh)
    model(**rs.shard_batch({"input_ids": tokens(1, 16)}, mesh))


def test_a_layer_whose_window_is_not_that_of_its_config_says_so(pool):
    for outcome in pool.outcomes(windowed, 2, 1, None):
        assert isinstance(outcome, rs.UnsupportedError)
        assert (
            "layer 1 of Qwen3Attention attends to all earlier tokens, but its config says the last 7"
            in str(outcome)
        )


def with_a_window(mesh: DeviceMesh, kind: str) -> Any:
    model = tiny_model(kind)
    ids = tokens(1, 37)
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss.detach()
    model = rs.parallelize(model, mesh)
    return model(
        **rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    ).loss.detach(), expected


@pytest.mark.parametrize("kind", ["qwen2_moe", "moshi"])
def test_windows_come_from_masks_if_attention_is_not_told(pool, kind):
    """Qwen2 MoE slides by its masks alone; Moshi has a window in its config and in no mask."""
    for loss, expected in pool.run(with_a_window, 2, kind):
        assert relative(loss, expected) < 1e-6
