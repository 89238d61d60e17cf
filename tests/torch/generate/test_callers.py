"""``generate`` as strangers call it: assistants, errors in the middle, odd types, models that train."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.cases import few
from tests.torch.generate import models
from tests.torch.generate.test_generate import LIMIT, padded_batch, plain, results


def assisted(model: Any) -> Any:
    """By a smaller model, on the ring too, that draws its candidates."""
    assistant: Any = models.model("llama", num_hidden_layers=2)
    if hasattr(model, "ring_mesh"):
        assistant = rs.parallelize(assistant, model.ring_mesh)
    torch.manual_seed(1)
    return plain(
        model,
        models.prompt(40),
        assistant_model=assistant,
        max_new_tokens=8,
        do_sample=True,
    )


def ended_apart(model: Any) -> Any:
    """Sequences that end at different tokens, and go on as padding."""
    ids = model.generate(**padded_batch(), max_new_tokens=8)
    ends = [int(ids[0, 47]), int(ids[1, 50])]
    return plain(model, **padded_batch(), eos_token_id=ends, max_new_tokens=8)


def after_an_error(model: Any) -> Any:
    """A hook raises in the middle of a token: the cache is refused, and after ``reset`` it serves."""
    calls: list[None] = []

    def raise_at_the_third(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise ArithmeticError

    hook = model.get_decoder().layers[2].register_forward_hook(raise_at_the_third)
    cache = (
        {"past_key_values": model.new_cache()} if hasattr(model, "new_cache") else {}
    )
    with pytest.raises(ArithmeticError):
        model.generate(models.prompt(40), max_new_tokens=8, **cache)
    hook.remove()
    if cache:
        with pytest.raises(rs.UnsupportedError, match=r"incomplete.*reset\(\)"):
            model.generate(models.prompt(60), max_new_tokens=2, **cache)
        with (
            pytest.raises(rs.UnsupportedError, match=r"incomplete.*reset\(\)"),
            torch.no_grad(),
        ):
            model(models.prompt(1), **cache)
        with pytest.raises(rs.UnsupportedError, match=r"incomplete.*reset\(\)"):
            # of which some layers have no row to take back
            cache["past_key_values"].crop(-1)
        with pytest.raises(rs.UnsupportedError, match=r"incomplete.*reset\(\)"):
            model.save_cache(cache["past_key_values"], "never-written")
        cache["past_key_values"].reset()
    return plain(model, models.prompt(40), **cache)


def odd_types(model: Any) -> Any:
    batch = padded_batch()
    return plain(
        model, batch["input_ids"].int(), attention_mask=batch["attention_mask"].bool()
    )


def by_hand(model: Any) -> Any:
    """Three calls of the model itself: a prompt, a second one, a token."""
    cache = (
        {"past_key_values": model.new_cache()}
        if hasattr(model, "new_cache")
        else {"use_cache": True}
    )
    outs = []
    for length in (40, 41, 1):
        outs.append(model(models.prompt(length), **cache))
        cache = {"past_key_values": outs[-1].past_key_values, "use_cache": True}

    return SimpleNamespace(
        sequences=outs[0].logits.argmax(-1),
        logits=tuple(out.logits[:, -1] for out in outs),
    )


WAYS = {
    way.__name__: way
    for way in (assisted, ended_apart, after_an_error, odd_types, by_hand)
}


def on_ring(mesh: DeviceMesh, name: str, way: str) -> Any:
    model: Any = rs.parallelize(models.model(name), mesh)
    type(model).ring_prefill_tokens = 13
    return results(WAYS[way], model)


@pytest.mark.parametrize("way", few(WAYS, 2))
def test_what_strangers_get_is_what_one_process_gives(pool, way):
    name = "gemma3_text" if way == "assisted" else "gpt_oss"
    ids, logits = results(WAYS[way], models.model(name))
    for found, found_logits in pool.run(on_ring, 2, name, way):
        assert torch.equal(found, ids)
        assert (found_logits - logits).norm() < LIMIT * logits.norm()


def from_training(mesh: DeviceMesh, options: dict[str, Any]) -> torch.Tensor:
    model: Any = rs.parallelize(models.model("llama").train(), mesh, **options)
    ids = plain(model, models.prompt(40)).sequences
    assert model.training
    return ids


@pytest.mark.parametrize(
    "more", [{"layers_per_checkpoint": 2}, {"offload": "activations"}]
)
def test_a_model_that_trains_with_checkpoints_generates(pool, more):
    expected = plain(models.model("llama"), models.prompt(40)).sequences
    assert all(
        torch.equal(ids, expected)
        for ids in pool.run(from_training, 2, {"checkpoint": "full"} | more)
    )


def by_any_name(mesh: DeviceMesh, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A text, the logits of one more token, and what the cache of both holds."""
    model: Any = rs.parallelize(models.model("llama"), mesh)
    cache = model.new_cache()
    ids = model.generate(models.prompt(40), max_new_tokens=5, **{name: cache})
    with torch.no_grad():
        return ids, model(ids[:, -1:], **{name: cache}).logits, cache.get_seq_length()


def test_a_cache_is_accepted_under_each_name_of_transformers(pool):
    expected = plain(models.model("llama"), models.prompt(40)).sequences[:, :45]
    found = [
        pool.run(by_any_name, 2, name)[0]
        for name in ("past_key_values", "cache", "cache_params")
    ]
    for ids, logits, held in found:
        assert (
            torch.equal(ids, expected)
            and torch.equal(logits, found[0][1])
            and held == 45
        )


def in_autocast(mesh: DeviceMesh | None) -> torch.Tensor:
    """Logits of a text under autocast, and of a second turn without it over the same cache."""
    model: Any = models.model("llama")
    if mesh is not None:
        model = rs.parallelize(model, mesh)
    ids, cache = (
        models.prompt(40),
        {"past_key_values": model.new_cache()}
        if mesh is not None
        else {"use_cache": True},
    )
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            first = model(ids, **cache)
            more = model(
                ids[:, :1], past_key_values=first.past_key_values, use_cache=True
            )
        if mesh is not None:
            assert (
                model(ids[:, :1], past_key_values=more.past_key_values)
                .logits.isfinite()
                .all()
            )
    return torch.cat((first.logits[:, -1:], more.logits), 1).float()


def test_autocast_is_as_near_as_on_one_process(pool):
    with torch.no_grad():
        ids = models.prompt(40)
        truth = models.model("llama")(torch.cat((ids, ids[:, :1]), 1)).logits[:, -2:]
    alone = (in_autocast(None) - truth).norm()
    for logits in pool.run(in_autocast, 2):
        assert (logits - truth).norm() < 2 * alone
