"""What ``parallelize`` refuses leaves the model as it was: it computes the same, and a corrected call works."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import ringspan as rs
from tests.torch.models import build, tokens

IDS = tokens(1, 37)
BAD: list[dict[str, Any]] = [
    {"layout": "spiral"},
    {"layout": None},
    {"route": "teleport"},
    {"wire": "morse"},
    {"kernel": "abacus"},
    {"checkpoint": "some"},
    {"checkpoint": "none", "layers_per_checkpoint": 2},
    {"checkpoint": "none", "offload": "activations"},
    {"layers_per_checkpoint": 0},
    {"layers_per_checkpoint": "two"},
    {"offload": "weights"},
    {"loss_chunk_tokens": 0},
    {"loss_chunk_tokens": 1.5},
    {"loss_chunk_vocabulary": -1},
    {"z_loss": -1.0},
    {"label_smoothing": 2.0},
    {"feedforward_chunk_tokens": -1},
    {"feedforward_chunk_tokens": "many"},
    {"norm_chunk_tokens": -5},
    {"norm_chunk_tokens": 2.5},
    {"compute_dtype": "bfloat16"},
    {"compute_dtype": torch.int8},
]


def loss_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, labels=IDS).loss


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
            same = torch.equal(loss_of(model), before) and model.config.to_dict() == config and describe(model) == state
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


def test_a_config_makes_ordinary_models_after_one_of_them_is_on_the_ring(pool):
    for before, after in pool.run(another_of_the_same_config, 2):
        assert before == after
