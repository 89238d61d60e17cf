"""Layers with a state in a trainer: it goes on from rank to rank as on one process, and ends with a document."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from tests.cases import long
from tests.hf.trainers import TOLERANCE, check, differences, sft, train


def read(model: Any, *, is_leaking: bool) -> None:
    """Let a decoder on one process read each packed document by itself, or all as one text. transformers' layers with a
    state do neither without CUDA kernels: they raise.
    """
    decoder = model.base_model
    plain = decoder.forward

    def forward(input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        assert len(input_ids) == 1
        starts = [0] if is_leaking else (position_ids[0] == 0).nonzero().flatten().tolist()
        assert is_leaking or len(starts) > 1
        places = pairwise([*starts, input_ids.shape[1]])
        hidden = [plain(input_ids=input_ids[:, start:end]).last_hidden_state for start, end in places]
        return BaseModelOutput(last_hidden_state=torch.cat(hidden, 1))

    decoder.forward = forward


def packed(mesh: Any, model: str, ring: dict[str, Any] | None, folder: str, options: dict[str, Any]) -> Any:
    options = {"max_steps": 3, "packing": True} | options
    is_leaking = options.pop("is_leaking", False)
    trainer = sft(mesh, model, ring, folder, options)
    if ring is None:
        read(trainer.model, is_leaking=is_leaking)
    return trainer


@pytest.mark.parametrize("kind", ["lfm2", *long("mamba2")])
def test_a_state_ends_with_a_packed_document(world, kind):
    expected, leaking = (train(None, packed, kind, None, {"is_leaking": each}) for each in (False, True))
    assert differences(leaking, expected)["loss"] > 100 * TOLERANCE  # by which a leak would be seen
    check(world, 2, packed, kind, {}, expected)
