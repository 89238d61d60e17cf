"""What ``parallelize`` refuses leaves the model as it was: it computes the same, and a corrected call works."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ringspan as rs
from tests.torch.models import build, tokens

IDS = tokens(1, 37)
BAD: list[dict[str, Any]] = [
    {"layout": "spiral"}, {"layout": None}, {"layout": "balanced", "route": "ulysses"}, {"route": "teleport"},
    {"comm_dtype": "morse"}, {"kernel": "abacus"}, {"checkpoint": "some"},
    {"checkpoint": "none", "layers_per_checkpoint": 2}, {"checkpoint": "none", "offload": "activations"},
    {"layers_per_checkpoint": 0}, {"layers_per_checkpoint": "two"}, {"offload": "weights"}, {"loss_chunk_tokens": 0},
    {"loss_chunk_tokens": 1.5}, {"loss_chunk_vocabulary": -1}, {"z_loss": -1.0}, {"label_smoothing": 2.0},
    {"feedforward_chunk_tokens": -1}, {"feedforward_chunk_tokens": "many"}, {"norm_chunk_tokens": -5},
    {"norm_chunk_tokens": 2.5}, {"compute_dtype": "bfloat16"}, {"compute_dtype": torch.int8}, {"compile": "javac"},
    {"compile": None}, {"compile": True, "offload": "activations"}, {"compile": True, "layers_per_checkpoint": 2},
    {"folds": 0}, {"folds": "two"}, {"folds": 2, "layout": "striped"}, {"folds": 2, "route": "ulysses"},
    {"compile": True, "folds": 2},
]  # fmt: skip


def loss_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def refused_then_corrected(mesh: DeviceMesh) -> list[tuple[str, Any]]:
    """For each bad call: what it raised and whether the model computes the same; then the loss of a good call."""
    model = build("llama").train()
    before, config = loss_of(model), model.config.to_dict()
    state = describe(model)
    outcomes: list[tuple[str, Any]] = []
    for options in BAD:
        try:
            rs.parallelize(model, mesh, **options)
            outcomes.append(("nothing raised", False))
        except rs.RingspanError as error:
            same = (
                torch.equal(loss_of(model), before)
                and model.config.to_dict() == config
                and describe(model) == state
            )
            outcomes.append((str(error), same))
    model = rs.parallelize(model, mesh)
    loss = model(**rs.shard_batch({"input_ids": IDS, "labels": IDS}, mesh)).loss
    loss.backward()
    return [*outcomes, ("loss", float(loss.detach()) - float(before))]


def describe(model: torch.nn.Module) -> Any:
    """Each module's class, mode, hooks and attributes of its own."""
    return {
        name: (
            type(module),
            module.training,
            sorted(key for key in vars(module)),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    }


def test_a_refused_option_leaves_the_model_as_it_was(pool):
    for outcomes in pool.run(refused_then_corrected, 2):
        *refused, (_, difference) = outcomes
        for options, (message, same) in zip(BAD, refused, strict=True):
            [value] = list(options.values())[-1:]
            assert same, (options, message)
            assert str(value).removeprefix("torch.") in message, (options, message)
            assert "\n" not in message
        assert abs(difference) < 1e-5


def another_of_the_same_config(mesh: DeviceMesh) -> tuple[float, float]:
    """The loss of a model on one process whose config was another model's, before and after that is on the ring."""
    config = build("llama").config
    torch.manual_seed(0)
    first = AutoModelForCausalLM.from_config(config)
    before = loss_of(first)
    rs.parallelize(first, mesh)
    torch.manual_seed(0)
    return float(before), float(loss_of(AutoModelForCausalLM.from_config(config)))


def test_a_config_makes_ordinary_models_after_the_ring(pool):
    for before, after in pool.run(another_of_the_same_config, 2):
        assert before == after


class Scaled(LlamaForCausalLM):
    """A model whose loss is not that of its class in transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = 3 * out.loss
        return out


def change(model: Any, how: str) -> Any:
    """A model that computes, or trains, something that a ring would drop."""
    match how:
        case "a forward of its own":
            model = Scaled(model.config)
        case "a loss of its own":
            model.loss_function = lambda logits, labels, **_: logits.float().sum()
        case "a gradient hook":
            model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)
        case "a weight of two layers":
            first, second = model.model.layers
            # in another place: no block that both have
            second.self_attn.q_proj.weight = first.self_attn.o_proj.weight
    return model


def changed(mesh: DeviceMesh, how: str, when: str) -> None:
    batch = rs.shard_batch({"input_ids": IDS, "labels": IDS}, mesh)
    if when == "before":
        rs.parallelize(change(build("llama"), how), mesh)
    else:
        model = rs.parallelize(build("llama"), mesh)
        model(**batch)
        change(model, how)(**batch)


@pytest.mark.parametrize(
    ("how", "when", "message"),
    [
        ("a forward of its own", "before", "has a loss of its own"),
        ("a loss of its own", "before", "has a loss of its own"),
        (
            "a loss of its own",
            "after",
            "the loss function of LlamaForCausalLM was changed",
        ),
        ("a gradient hook", "before", "lm_head.weight has a gradient hook"),
        ("a gradient hook", "after", "lm_head.weight has a gradient hook"),
        ("a weight of two layers", "before", "is a weight of model.layers.0 too"),
    ],
)
def test_what_a_ring_would_not_compute_raises_on_every_rank(pool, how, when, message):
    for outcome in pool.outcomes(changed, 2, how, when):
        assert isinstance(outcome, rs.UnsupportedError) and message in str(outcome)


def shared_module(mesh: DeviceMesh) -> float:
    model = build("llama")
    model.model.layers[1] = model.model.layers[0]
    expected = float(loss_of(model))
    return (
        float(
            rs.parallelize(model, mesh)(
                **rs.shard_batch({"input_ids": IDS, "labels": IDS}, mesh)
            ).loss
        )
        - expected
    )


def test_a_layer_may_be_used_twice(pool):
    assert all(abs(difference) < 1e-5 for difference in pool.run(shared_module, 2))
