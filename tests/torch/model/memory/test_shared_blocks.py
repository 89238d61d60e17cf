"""Blocks that several layers have over the same parameters become one, and what shares a weight but no block raises."""

import pytest
import torch
from torch import nn

import ringspan as rs
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.memory.shared_blocks import (
    find_shared_blocks,
    join_shared_blocks,
)
from tests.torch.engine.recurrence.models import build as build_hybrid
from tests.torch.models import build, check, step


def test_layers_are_the_outermost_ones():
    model = build_hybrid("zamba2", torch.float32)
    assert [*layers_of(model)] == [f"model.layers.{number}" for number in range(5)]


def test_equal_blocks_become_one_which_computes_the_same():
    model = build_hybrid("zamba2", torch.float32)
    ids = torch.arange(3, 23)[None]
    before, names = model(input_ids=ids, use_cache=False).logits, [*model.state_dict()]
    found = find_shared_blocks(model)
    assert [(block.layer, block.place) for block in found] == [
        ("model.layers.4", "shared_transformer")
    ]
    (block,) = join_shared_blocks(model)
    assert (
        model.model.layers[1].shared_transformer
        is model.model.layers[4].shared_transformer
        is block
    )
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    assert [*model.state_dict()] == names
    assert find_shared_blocks(build("llama")) == []


@pytest.mark.parametrize("what", ["hook", "forward", "setting"])
def test_a_block_that_does_more_than_its_equal_stays(what):
    """What is the same further inside becomes one all the same."""
    model = build_hybrid("zamba2", torch.float32)
    block = model.model.layers[4].shared_transformer
    if what == "hook":
        block.register_forward_hook(lambda *_: None)
    elif what == "forward":
        block.forward = block.forward
    else:
        block.block_id = 7
    places = {each.place for each in find_shared_blocks(model)}
    assert "shared_transformer" not in places
    assert {"shared_transformer.self_attn", "shared_transformer.feed_forward"} <= places


def test_a_weight_that_two_layers_share_alone_raises():
    model = build("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj = nn.utils.parametrizations.weight_norm(second.up_proj)
    second.up_proj.parametrizations.weight.original1 = first.up_proj.weight
    with pytest.raises(
        rs.UnsupportedError,
        match=r"original1 is a weight of model\.layers\.0 too, and what is around",
    ):
        find_shared_blocks(model)


def with_a_shared_projection():
    model = build("llama")
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    return model


def trained_with_a_shared_projection(mesh, checkpoint):
    return step(
        rs.parallelize(with_a_shared_projection(), mesh, checkpoint=checkpoint), mesh
    )


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_projection_of_two_layers_is_trained_as_on_one_process(pool, checkpoint):
    check(
        pool.run(trained_with_a_shared_projection, 2, checkpoint),
        step(with_a_shared_projection()),
    )
