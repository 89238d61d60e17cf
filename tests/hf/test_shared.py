"""Trainers that compute what rows begin with alike once are what they are on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForTokenClassification

from ringspan.core.errors import UnsupportedError
from ringspan.hf import RingConfig
from ringspan.hf.batches import takes_whole_batches, whole_logits
from tests.every_model.hybrids import HYBRIDS
from tests.torch.engine.recurrence.models import build as build_stateful
from tests.torch.models import build, config, tokens

SHARED = {"shared_prefix": True, "min_shared_tokens": 1}


def both_ways(mesh: DeviceMesh, kind: str, batch: dict[str, Tensor]) -> list[Any]:
    """Loss, logits, loss of evaluation and tokens of the decoder, without and with shared prefixes."""
    results = []
    for options in ({}, SHARED):
        model, seen = made(kind), []
        takes_whole_batches(model, mesh, RingConfig(mesh=mesh, **options))
        model.model.embed_tokens.register_forward_hook(
            lambda _, given, __, seen=seen: seen.append(given[0].numel())
        )
        model.eval()
        with torch.no_grad(), whole_logits(model, wanted=True):
            evaluated = model(**batch)
        loss = model(**batch).loss
        results.append((loss.detach(), evaluated.logits, evaluated.loss, seen[0]))
    return results


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def made(kind: str) -> Any:
    if kind == "dynamic":
        return build("llama", max_position_embeddings=16, rope_parameters=DYNAMIC)
    return build_stateful(kind, torch.float32) if kind in HYBRIDS else build(kind)


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("llama", "left"),
        ("llama", "right"),
        ("llama4_text", "right"),
        ("jamba", "left"),
        ("dynamic", "left"),
    ],
)
def test_a_batch_with_shared_prefixes_is_its_rows(world, kind, side):
    ids = tokens(4, 20)
    ids[1, :13], ids[3] = ids[0, :13], ids[0]
    mask = torch.ones_like(ids)
    mask[:2, :4] = mask[3, :4] = 0
    mask[2] = 0
    if side == "right":
        ids, mask = ids.roll(-4, 1), mask.flip(1)
    labels = ids.masked_fill((ids % 4 == 0) | (mask == 0), -100)
    labels[:, 4 * (side == "left")] = -100
    for rows, shared in world(2).run(
        both_ways, 2, kind, {"input_ids": ids, "attention_mask": mask, "labels": labels}
    ):
        for one, other in zip(rows[:3], shared[:3], strict=True):
            one, other = (x[mask == 1] if x.ndim else x for x in (one, other))
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert shared[3] < rows[3] / 2


def refusals(mesh: DeviceMesh) -> list[str]:
    found, ids = [], tokens(2, 9)
    padded = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]] * 2),
    }
    placed = {"input_ids": ids, "position_ids": torch.arange(9)[None]}
    for kind, batch in (("gpt2", padded), ("llama4_text", padded), ("llama", placed)):
        model = build(kind)
        takes_whole_batches(model, mesh, RingConfig(mesh=mesh, **SHARED))
        with pytest.raises(UnsupportedError) as error:
            model(**batch)
        found.append(str(error.value))
    tagger = AutoModelForTokenClassification.from_config(
        config("llama", classifier_dropout=0.0)
    )
    with pytest.raises(UnsupportedError) as error:
        takes_whole_batches(tagger, mesh, RingConfig(mesh=mesh, **SHARED))
    return [*found, str(error.value)]


def test_rows_that_cannot_be_shared_are_refused(world):
    for found in world(2).run(refusals, 2):
        reasons = (
            "pad on the right",
            "pad on the right",
            "no position_ids",
            "labels each token",
        )
        assert all(reason in each for reason, each in zip(reasons, found, strict=True))
