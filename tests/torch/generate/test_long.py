"""Long prompts and long texts, token for token those of one process: 251 tokens and 12 new ones, in ``make long`` 4,999
and 200. Lengths are multiples of nothing.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.cases import long
from tests.torch.generate import models


class Size(NamedTuple):
    """Tokens of a prompt, new ones, and of a chunk per rank."""

    prompt: int
    new: int
    chunk: int


SHORT, LONG = Size(251, 12, 31), Size(4_999, 200, 611)


def texts(model: Any, size: Size) -> list[torch.Tensor]:
    """The most likely tokens, and tokens drawn under a seed."""
    ids = models.prompt(size.prompt)
    greedy = model.generate(ids, max_new_tokens=size.new, do_sample=False)
    torch.manual_seed(3)
    return [
        greedy,
        model.generate(
            ids, max_new_tokens=size.new, do_sample=True, top_p=0.9, temperature=0.8
        ),
    ]


def on_ring(mesh: DeviceMesh, name: str, size: Size) -> list[torch.Tensor]:
    model: Any = rs.parallelize(models.model(name), mesh)
    model.ring_prefill_tokens = size.chunk
    return texts(model, size)


@pytest.mark.parametrize(
    ("name", "size", "ranks", "tp"),
    [
        ("gpt_oss", SHORT, 2, 1),
        *long(("mistral", SHORT, 3, 1), ("llama", SHORT, 4, 2)),
        *long(
            *((name, LONG, 2, 1) for name in models.CONFIGS), ("mistral", LONG, 3, 1)
        ),
    ],
)
def test_a_long_text_is_that_of_one_process(pool, name, size, ranks, tp):
    expected = texts(models.model(name), size)
    assert expected[0].shape[1] == size.prompt + size.new
    for found in pool.run(on_ring, ranks, name, size, tp=tp):
        for text, other in zip(found, expected, strict=True):
            assert torch.equal(text, other), int((text != other).any(0).nonzero()[0])


def logits(model: Any, prompt: int) -> torch.Tensor:
    """Of a prompt's last token and of the next ones, which are given."""
    ids = models.prompt(prompt)
    cache = (
        {"past_key_values": model.new_cache()}
        if hasattr(model, "new_cache")
        else {"use_cache": True}
    )
    rows = []
    with torch.no_grad():
        for part in (ids[:, :-9], *ids[:, -9:].split(1, 1)):
            out = model(part, logits_to_keep=1, **cache)
            rows.append(out.logits)
            cache = {"past_key_values": out.past_key_values, "use_cache": True}
    return torch.cat(rows, 1).float()


# Where experts are chosen, a score that is rounded another way is another expert, and the error is of that.
DENSE = {"deepseek_v3": {"first_k_dense_replace": 4}}


def dense(name: str) -> Any:
    return models.model(name, **DENSE.get(name, {}))


def in_bfloat16(mesh: DeviceMesh, name: str, size: Size) -> torch.Tensor:
    model: Any = rs.parallelize(dense(name).bfloat16(), mesh)
    model.ring_prefill_tokens = size.chunk
    return logits(model, size.prompt)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gemma3_text", SHORT),
        *long(("deepseek_v3", SHORT), ("llama", LONG), ("mistral", LONG)),
    ],
)
def test_bfloat16_is_as_near_as_the_attentions_of_one_process(pool, name, size):
    """Against float32: no further than twice what one process is, with its own eager or sdpa attention."""
    truth, alone = logits(dense(name), size.prompt), []
    for attention in ("eager", "sdpa"):
        model: Any = dense(name).bfloat16()
        model.set_attn_implementation(attention)
        alone.append((logits(model, size.prompt) - truth).norm())
    assert min(alone) > 1e-3 * truth.norm(), "it is rounded"
    for found in pool.run(in_bfloat16, 2, name, size):
        assert (found - truth).norm() < 2 * max(alone)
