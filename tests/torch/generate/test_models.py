"""Kinds of models of which a cache has to know something special: on a ring against one process."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.every_model.tiny import tiny_model, tiny_tokens
from tests.torch.generate.test_generate import plain, results

LIMIT = 1e-5


def text(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return results(lambda model: plain(model.eval(), tiny_tokens(40), **options), model)


def on_ring(mesh: DeviceMesh, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = tiny_model(kind)
    model = rs.parallelize(model, mesh, checkpoint="attention" if model.supports_gradient_checkpointing else "none")
    type(model).ring_prefill_tokens = 9
    return text(model)


@pytest.mark.parametrize(
    "kind",
    [
        "afmoe",  # views what attention returns
        "gemma3n_text",  # layers that take the keys of earlier ones
        "gemma4_text",
        "mllama",  # layers that attend to images alone
        "ministral3",  # a factor on queries by position
    ],
)
def test_the_text_of_special_types_equals_one_process(pool, kind):
    ids, logits = text(tiny_model(kind))
    for found, found_logits in pool.run(on_ring, 2, kind):
        assert torch.equal(found, ids)
        assert (found_logits - logits).norm() < LIMIT * logits.norm()


def test_a_layer_that_sees_more_than_its_config_is_refused(pool):
    """Of Moshi's window the mask knows nothing, and on one process its cache forgets by it all the same."""
    for outcome in pool.outcomes(on_ring, 2, "moshi"):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "sliding_window" in str(outcome)
