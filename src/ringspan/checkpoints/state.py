"""The state of a model in training: tensors, random numbers, and facts of its files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.shards import Manifest, Part, moved_tensors
from ringspan.core.errors import CheckpointError
from ringspan.torch.model.config_changes import deciding_fields
from ringspan.torch.model.memory.adamw import is_local, own_state, take_counts


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Collect, as JSON, the facts in the model's other files that a run depends on."""
    files = {
        "config.json": model.config,
        "generation_config.json": getattr(model, "generation_config", None),
    }
    facts = {
        name: deciding_fields(config)
        for name, config in files.items()
        if config is not None
    }
    return {"transformers": transformers.__version__, **facts}


def run_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor | Part]:
    """Return the tensors to resume from: trained parameters, buffers and optimizer state, without frozen parameters.

    A fresh optimizer first gets the state of its first step to load into. A tensor in host memory is a part, split like
    its weight.
    """
    _make_state(optimizer)
    parameters: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen and not is_frozen:  # tied weights have two names
            seen.add(id(tensor))
            parameters[name] = tensor
    tensors: dict[str, Tensor | Part] = {
        f"model/{name}": tensor for name, tensor in parameters.items()
    }
    for name, parameter in parameters.items():
        if (
            isinstance(parameter, nn.Parameter)
            and parameter.requires_grad
            and not is_local(optimizer)
        ):
            for key, value in optimizer.state[parameter].items():
                # A step count is one number, equal on every rank; state with dimensions is split like its weight.
                is_split = isinstance(parameter, DTensor) and value.ndim > 0
                is_part = is_split and not isinstance(value, DTensor)
                tensors[f"optimizer/{name}/{key}"] = (
                    Part(value, cast(DTensor, parameter)) if is_part else value
                )
    return tensors


def load_state(
    checkpoints: Checkpoints, folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor | Part],
    optimizer: torch.optim.Optimizer, own: Mapping[str, Tensor],
) -> bool:  # fmt: skip
    """Fill tensors from a checkpoint; return True if it has this number of ranks, and then fill ``own`` ones too.

    Errors are raised on all ranks.
    """
    # A tensor that the model lacks would be lost without an error. Names of ranks' own tensors begin with "rank ".
    moved = moved_tensors(manifest, tensors)
    known = {each.name for rows in moved.values() for each in rows} | tensors.keys()
    unknown = [
        name
        for name in manifest.tensors
        if name not in known and not name.startswith("rank ")
    ]
    if unknown:
        raise CheckpointError(
            f"{folder}: has {unknown[0]}, which {_lacking(unknown[0], optimizer)}"
        )
    same = manifest.num_ranks == dist.get_world_size()
    if is_local(optimizer) and not same:
        raise CheckpointError(
            f"{folder}: {type(optimizer).__name__} has packed its state by the shards of {manifest.num_ranks} ranks; "
            "resume on as many, or train with an AdamW of PyTorch or torchao"
        )
    packed = own_state(optimizer)
    checkpoints.load(folder, manifest, tensors, {**own, **packed} if same else None)
    take_counts(optimizer, packed)
    return same


def _lacking(name: str, optimizer: torch.optim.Optimizer) -> str:
    if name.startswith("optimizer/"):
        return f"{type(optimizer).__name__} does not keep; it was saved with another optimizer, so set that one again"
    return "this model lacks; is it of another model? use its own"


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state by a step at rate 0; only it knows where and in what dtype it is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Parameters with a state keep it, since this is called for running optimizers too.
    fresh = [p for p in parameters if p.requires_grad and not optimizer.state[p]]
    if not fresh:
        return
    with _at_rest(optimizer, parameters):
        for p in fresh:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p in fresh:
            if "step" in optimizer.state[p]:
                optimizer.state[p]["step"] *= 0


@contextmanager
def _at_rest(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor]
) -> Iterator[None]:
    """Take the gradients of an optimizer's parameters away and set its rates to 0, and give both back after it."""
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    yield
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random/cuda"] = torch.cuda.get_rng_state(device)
    return state


def begin_random_numbers(*numbers: int) -> None:
    """Seed the generators from these numbers and the rank, so that ranks drop tokens independently."""
    [seed] = np.random.SeedSequence([*numbers, dist.get_rank()]).generate_state(1)
    torch.manual_seed(int(seed))


def restore(
    checkpoints: Checkpoints, folder: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:  # fmt: skip
    """Restore model, optimizer and random numbers; with another number of ranks, seed these again.

    Errors are raised on all ranks.
    """
    tensors = run_state(model, optimizer)
    random = random_state(device)
    if not load_state(checkpoints, folder, manifest, tensors, optimizer, random):
        begin_random_numbers(manifest.step, dist.get_world_size())
        return
    torch.set_rng_state(random["random/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random["random/cuda"], device)
