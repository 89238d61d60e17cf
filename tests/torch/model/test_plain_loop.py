"""A loop of the user's own around ``parallelize``: whatever is called between its steps, it trains as one process."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.torch.models import build, tokens

STEPS = 3


class Stop(Exception):
    """Raised in the middle of a forward pass."""


def fail(*_: Any) -> None:
    raise Stop


def evaluate(model: Any, batch: Any, how: str) -> None:
    """A pass that does not train."""
    match how:
        case "no_grad":
            with torch.no_grad():
                model(**batch)
        case "inference_mode":
            with torch.inference_mode():
                model(**batch)
        case "eval":
            model.eval()
            with torch.no_grad():
                model(**batch)
            model.train()
        case "no backward":
            model(**batch)
        case "an exception":
            hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
            with pytest.raises(Stop):
                model(**batch)
            hook.remove()
        case "an exception in backward":
            hook = model.model.layers[0].mlp.register_full_backward_hook(fail)
            with pytest.raises(Stop):
                model(**batch).loss.backward()
            hook.remove()
            model.zero_grad()  # as a loop does that goes on


def losses(model: Any, batch: Any, how: str, when: str) -> list[float]:
    """The loss of each step of a loop, with an evaluation somewhere in it."""
    if when == "before the optimizer":
        evaluate(model, batch, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        if when == "before the step":
            evaluate(model, batch, how)
        loss = model(**batch).loss
        if when == "before backward":
            evaluate(model, batch, how)
        loss.backward()
        if when == "before the update":
            evaluate(model, batch, how)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def losses_on_ring(mesh: DeviceMesh, how: str, when: str, compiled: bool) -> list[float]:
    model = rs.parallelize(build("llama"), mesh)
    ids = tokens(1, 37)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    if compiled:
        model = torch.compile(model, backend="eager")
    try:
        return losses(model, batch, how, when)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("when", ["before the optimizer", "before the step", "before backward", "before the update"])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "eval", "no backward", "an exception"])
def test_an_evaluation_in_between_changes_nothing(pool, how, when):
    ids = tokens(1, 37)
    expected = losses(build("llama"), {"input_ids": ids, "labels": ids}, "nothing", "never")
    for found in pool.run(losses_on_ring, 2, how, when, False):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("when", ["before the optimizer", "before the step"])
def test_an_exception_in_backward_changes_nothing_that_follows(pool, when):
    ids = tokens(1, 37)
    expected = losses(build("llama"), {"input_ids": ids, "labels": ids}, "nothing", "never")
    for found in pool.run(losses_on_ring, 2, "an exception in backward", when, False):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_an_evaluation_of_a_compiled_model_in_between_changes_nothing(pool, how):
    ids = tokens(1, 37)
    expected = losses(build("llama"), {"input_ids": ids, "labels": ids}, "nothing", "never")
    for found in pool.run(losses_on_ring, 2, how, "before the update", True):
        assert found == pytest.approx(expected, rel=1e-5)
