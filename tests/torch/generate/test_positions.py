"""A text that is longer than its model: refused where a table of positions ends, said once where none does."""

import logging
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.every_model.tiny import tiny_model
from tests.torch import models as tables
from tests.torch.generate import models
from tests.torch.generate.test_generate import plain

POSITIONS = 32


def learned() -> Any:
    """A model with a table of 32 positions, that ends no text by itself."""
    model: Any = tables.build(
        "gpt2",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        max_position_embeddings=POSITIONS,
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def padded(real: int, columns: int) -> dict[str, torch.Tensor]:
    """Two prompts of which the longer has ``real`` tokens, in more columns than the model has positions."""
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[0, : columns - real] = mask[1, : columns - real + 7] = 0
    return {
        "input_ids": models.prompt(columns, batch=2) % 90 * mask,
        "attention_mask": mask,
    }


def up_to_the_end(model: Any) -> list[torch.Tensor]:
    ids = models.prompt(29)
    return [
        plain(model, ids, max_new_tokens=3).sequences,
        model.generate(ids, max_length=POSITIONS),
        model.generate(**padded(29, 40), max_new_tokens=3, pad_token_id=0),
    ]


def beyond_the_end(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    model: Any = rs.parallelize(learned(), mesh)
    model.generate(**{"input_ids": models.prompt(29), **options})


def to_the_last(mesh: DeviceMesh) -> list[torch.Tensor]:
    return up_to_the_end(rs.parallelize(learned(), mesh))


def test_a_text_may_fill_the_table(pool):
    expected = up_to_the_end(learned())
    for found in pool.run(to_the_last, 2):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def last_logits(mesh: DeviceMesh | None, kind: str) -> torch.Tensor:
    """Of prompts that are padded on the left, in one pass that is told no positions."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    is_dynamic = kind == "dynamic"  # frequencies by the length, padding included
    model = (
        tables.build("llama", max_position_embeddings=8, rope_parameters=rope)
        if is_dynamic
        else tiny_model(kind)
    )
    model.eval()
    if mesh is not None:
        rs.parallelize(model, mesh)
    with torch.no_grad():
        cache = {} if mesh is None else {"past_key_values": model.new_cache()}
        return model(**padded(15, 19), use_cache=True, **cache).logits[:, -1]


@pytest.mark.parametrize("kind", ["bart", "opt", "xglm", "dynamic"])
def test_a_pass_over_a_cache_counts_padding_as_transformers_does(pool, kind):
    for found in pool.run(last_logits, 2, kind):
        torch.testing.assert_close(found, last_logits(None, kind), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 4}, "prompt of 29 with 4 new ones needs 33"),
        ({"max_length": 33}, "prompt of 29 with 4 new ones needs 33"),
        ({"max_new_tokens": 4, "num_beams": 2}, "needs 33"),
        ({**padded(29, 40), "max_new_tokens": 4}, "prompt of 29 with 4"),
        ({"input_ids": models.prompt(33), "max_new_tokens": 1}, "prompt of 33"),
    ],
)
def test_a_text_beyond_the_table_raises_before_it_is_read(pool, options, says):
    for outcome in pool.outcomes(beyond_the_end, 2, options):
        assert isinstance(outcome, rs.UnsupportedError)
        assert says in str(outcome) and "lower max_new_tokens" in str(outcome)


def texts_and_warnings(mesh: DeviceMesh) -> tuple[list[torch.Tensor], list[str]]:
    """Three texts, the last two of them longer than the model was made for; what was said."""
    model: Any = rs.parallelize(
        models.model("llama", max_position_embeddings=POSITIONS), mesh
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ringspan.torch.model.layers.positions")
    logger.addHandler(handler)
    try:
        texts = [
            plain(model, models.prompt(length), max_new_tokens=5).sequences
            for length in (27, 28, 50)
        ]
    finally:
        logger.removeHandler(handler)
    assert model.config.max_position_embeddings == POSITIONS
    return texts, said


def test_a_text_beyond_a_rotary_model_is_logged_and_written(pool):
    model = models.model("llama", max_position_embeddings=POSITIONS)
    expected = [
        plain(model, models.prompt(length), max_new_tokens=5).sequences
        for length in (27, 28, 50)
    ]
    for rank, (texts, said) in enumerate(pool.run(texts_and_warnings, 2)):
        assert all(torch.equal(*pair) for pair in zip(texts, expected, strict=True))
        assert len(said) == (1 if rank == 0 else 0)
        assert (
            rank
            or "a prompt of 28 tokens with 5 new ones is longer than the 32 positions"
            in said[0]
        )
