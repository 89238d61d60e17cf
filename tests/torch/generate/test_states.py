"""Models with states and convolutions, whose cache is whole on every rank, write what one process writes."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.arguments import is_split
from ringspan.core.errors import UnsupportedError
from tests.cases import long
from tests.torch.engine.recurrence.models import build
from tests.torch.generate.models import prompt

MORE = (
    "qwen3_5_text", "kimi_linear", "olmo_hybrid", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "mamba",
    "falcon_mamba",
)  # fmt: skip
# fewer tokens than a convolution has taps; chunks that are split, and a last one that is not
LENGTHS = (
    1,
    2,
    71,
)
CHUNK = 17  # per rank: two of them are enough to be split
NEW = 4


def made(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    # no token ends a text, and none of a prompt is padding
    model = build(kind, dtype, **changes).eval()
    for config in (
        model.config,
        model.generation_config,
    ):
        config.eos_token_id, config.pad_token_id = None, 0
    return model


def after(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """A text with its most likely continuation; what was written may have the token of padding."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        **options,
    )


def texts(model: Any) -> list[torch.Tensor]:
    return [
        *(after(model, prompt(length)) for length in LENGTHS),
        after(model, prompt(37, 2), num_beams=3),
    ]


def logits_of(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(LENGTHS[-1]), **options).logits


def on_ring(mesh: DeviceMesh, kind: str, asked: torch.Tensor) -> Any:
    model: Any = rs.parallelize(made(kind), mesh)
    model.ring_prefill_tokens = CHUNK
    assert is_split(2 * CHUNK, 2)
    cache = model.new_cache()
    first = after(model, prompt(41), past_key_values=cache)
    second = after(model, torch.cat((first, asked), 1), past_key_values=cache)
    return texts(model), second, logits_of(model, past_key_values=model.new_cache())


@pytest.mark.parametrize(
    "kind", ["mamba2", "lfm2", *long("qwen3_next", "jamba", *MORE)]
)
def test_tokens_and_logits_are_those_of_one_process(pool, kind):
    model, asked = made(kind), prompt(43, seed=5)
    expected, logits = texts(model), logits_of(model, use_cache=False)
    second = after(model, torch.cat((after(model, prompt(41)), asked), 1))
    for found, turn, those in pool.run(on_ring, 2, kind, asked):
        for text, other in zip(found, expected, strict=True):
            assert torch.equal(text, other)
        assert torch.equal(turn, second)
        assert (those - logits).abs().max() < 2e-5 * logits.abs().max()


def refused(mesh: DeviceMesh, folder: str) -> list[str]:
    model: Any = rs.parallelize(made("bamba"), mesh)
    cache, ids = model.new_cache(), prompt(11, 2)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    other: Any = rs.parallelize(made("minimax"), mesh)
    said = []
    for call in (
        lambda: model.generate(ids, attention_mask=padded, max_new_tokens=1),
        lambda: model.generate(ids[:1], prompt_lookup_num_tokens=3, max_new_tokens=1),
        lambda: cache.crop(-1),
        lambda: model.save_cache(cache, f"{folder}/cache"),
        lambda: other.generate(ids, max_new_tokens=1),
    ):
        with pytest.raises(UnsupportedError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_what_states_do_not_allow_raises(pool, tmp_path):
    for padding, lookup, crop, saved, own in pool.run(refused, 2, str(tmp_path)):
        assert "attention_mask with padding" in padding and "one at a time" in padding
        assert (
            "prompt_lookup_num_tokens is not supported with BambaForCausalLM" in lookup
        )
        assert "cannot crop a cache of layers with a state" in crop
        assert "states of BambaForCausalLM is not saved" in saved
        assert (
            "MiniMaxForCausalLM does not generate on a ring" in own
            and "cache of its own" in own
        )
