"""RoPE scaling in the configuration of a run."""

from typing import Any

import pytest

from ringspan.core.errors import ConfigError
from ringspan.train.model import scale_rope
from tests.torch.models import config

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("rope", "longest", "written"),
    [
        ({"type": "linear", "factor": 4}, 2048, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "dynamic", "factor": 2.0}, 512, {"rope_type": "dynamic", "factor": 2.0}),
        ({"type": "yarn", "factor": 1.5, "beta_fast": 16.0}, 768, {"rope_type": "yarn", "beta_fast": 16.0}),
        ({"type": "llama3", "factor": 8}, 4096, {"low_freq_factor": 1.0, "original_max_position_embeddings": 512}),
        ({"type": "longrope", "factor": 4.0, **FACTORS}, 2048, {**FACTORS, "original_max_position_embeddings": 512}),
    ],
)
def test_scaling_is_written_in_the_terms_of_transformers(rope: dict[str, Any], longest: int, written: dict[str, Any]):
    model_config = config("llama")
    theta = model_config.rope_parameters["rope_theta"]
    scale_rope(model_config, rope)
    assert model_config.max_position_embeddings == longest
    assert model_config.rope_parameters["rope_theta"] == theta
    assert written.items() <= model_config.rope_parameters.items()
    assert "type" not in model_config.rope_parameters


@pytest.mark.parametrize(
    ("kind", "rope", "message"),
    [
        ("llama", {"factor": 2.0}, "model.rope.type = None"),
        ("llama", {"type": "yarn"}, "model.rope.factor = None"),
        ("llama", {"type": "longrope", "factor": 2.0}, "long_factor"),
        ("gemma3_text", {"type": "yarn", "factor": 2.0}, "no rotary positions that all its layers share"),
    ],
)
def test_scaling_that_cannot_be_is_refused(kind: str, rope: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        scale_rope(config(kind), rope)
