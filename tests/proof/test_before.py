"""Proofs before the first step, as the trainers of transformers take it."""

import logging
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.hf import RingConfig
from ringspan.hf.batches import takes_whole_batches
from ringspan.proof import before
from tests.cases import long
from tests.proof.test_run import Plant, planted, scaled_gradient
from tests.torch.models import build


def put(mesh: Any, plant: Plant | None, on_ring: bool) -> tuple[list[str], bool]:
    """Put a model on a ring as the trainers do; what was logged or raised, and whether random numbers are the same."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger(before.__name__)
    logger.addHandler(handler)
    model = build("llama")
    if on_ring:
        model = rs.parallelize(model, mesh, layout="striped")
    torch.manual_seed(5)
    try:
        with planted(plant):
            takes_whole_batches(
                model, mesh, RingConfig(mesh=mesh, prove=True, layout="striped")
            )
    except rs.RingspanError as error:
        said.append(f"raised: {error}")
    finally:
        logger.removeHandler(handler)
    drawn = float(torch.rand(()))
    torch.manual_seed(5)
    return said, drawn == float(torch.rand(()))


@pytest.mark.parametrize("on_ring", [*long(False), True])
def test_a_trainer_proves_before_the_first_step(pool, on_ring):
    first, other = pool.run(put, 2, None, on_ring)
    ((line,), is_same) = first
    assert line.startswith("prove=True: LlamaForCausalLM is exact"), line
    assert "in " in line and "not tried: the model's full size" in line
    assert other == ([], True) and is_same


def test_a_difference_raises_on_every_rank(pool):
    for (line,), _ in pool.run(put, 2, scaled_gradient, False):
        assert line.startswith("raised: prove=True: LlamaForCausalLM differs")
        assert "first at the gradient of model.layers.0." in line
