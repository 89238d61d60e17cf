"""Models that compute in float64 all through."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from ringspan.proof.float64 import in_float64_of
from ringspan.proof.small import small_model
from ringspan.proof.trial import Subject


@pytest.fixture(scope="module")
def model():
    config = small_model(CONFIG_MAPPING["minimax"]()).config
    subject = Subject(config=config)
    return subject.make(torch.float32)


def test_tables_that_a_model_computes_have_full_width(model):
    wide = in_float64_of(model)
    for name, buffer in wide.named_buffers():
        if name.endswith("query_decay"):
            slopes = dict(wide.named_buffers())[
                name.replace("query_decay", "slope_rate")
            ]
            places = torch.arange(buffer.shape[-2], dtype=torch.float64) + 1
            expected = torch.exp(-slopes * places[:, None])
            torch.testing.assert_close(buffer, expected, rtol=1e-14, atol=0)
            break
    else:
        pytest.fail("MiniMax has no such table")
    assert torch.get_default_dtype() == torch.float32


def test_tables_that_were_changed_stay(model):
    name, buffer = next(
        (name, x) for name, x in model.named_buffers() if name.endswith("slope_rate")
    )
    before = buffer.clone()
    buffer.mul_(1.5)
    assert torch.equal(dict(in_float64_of(model).named_buffers())[name].float(), buffer)
    buffer.copy_(before)
