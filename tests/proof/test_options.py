"""Options of a step in a trial: as given, smaller, or named as not tried."""

from dataclasses import fields

import torch

from ringspan.core.step_config import StepConfig
from ringspan.proof.options import OPTIONS, options_of_trial


def test_each_option_of_a_step_is_decided_once():
    assert {*OPTIONS} == {field.name for field in fields(StepConfig)}


def test_blocks_are_smaller_than_a_trial():
    given = {
        "loss_chunk_tokens": 512,
        "loss_chunk_vocabulary": 3,
        "feedforward_chunk_tokens": 0,
        "route": "ulysses",
        "checkpoint": "attention",
    }
    tried, untried = options_of_trial(given)
    assert tried == {
        "loss_chunk_tokens": 7,
        "loss_chunk_vocabulary": 3,
        "feedforward_chunk_tokens": 0,
        "route": "ulysses",
    }
    assert untried == []


def test_what_is_not_tried_is_named_with_its_value():
    given = {"index_loss": "dense", "compute_dtype": torch.bfloat16, "watchdog": True}
    tried, untried = options_of_trial(given)
    assert tried == {}
    for said in ("index_loss=dense (", "compute_dtype=torch.bfloat16 (", "watchdog="):
        assert any(each.startswith(said) for each in untried)
