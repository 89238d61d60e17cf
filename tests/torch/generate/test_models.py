"""Kinds of models of which a cache has to know something special: on a ring against one process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from transformers import DynamicCache

import ringspan as rs
from ringspan.core.arguments import SPLIT_FROM_TOKENS
from ringspan.plan.generation.cost import Text, text_bytes
from ringspan.plan.model.configs import from_config
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.generate.cache.pools import Pools
from ringspan.torch.generate.options import cache_bytes
from tests.cases import few, long
from tests.every_model.tiny import MULTIMODAL, tiny_config, tiny_model, tiny_tokens
from tests.torch.generate import models
from tests.torch.generate.test_generate import (
    WAYS,
    fresh_cache,
    greedy,
    padded_batch,
    plain,
    results,
)
from tests.torch.generate.test_states import made

LIMIT = 1e-5
IN_FLOAT64 = 1e-9


def read(model: Any) -> Any:
    """A text's logits in the model's own dtype, of which ``generate`` hands on float32."""
    ids = tiny_tokens(71)
    return SimpleNamespace(
        sequences=ids, logits=[model(ids, **fresh_cache(model)).logits]
    )


def unlike(model: Any) -> Any:
    """Rows of less than a pool, of a pool, of a chunk that begins with padding alone, and of no padding."""
    return plain(model, **padded((3, 4, 36, 71)), num_beams=2)


def padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids, starts = (
        models.prompt(max(lengths), len(lengths)),
        max(lengths) - torch.tensor(lengths),
    )
    mask = (torch.arange(ids.shape[1]) >= starts[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def cropped(model: Any) -> Any:
    """Tokens that are taken back, more of them than a pool has, and then one new one, two, and many."""
    kept = fresh_cache(model) or {"past_key_values": DynamicCache(config=model.config)}
    kept["past_key_values"].activate_past_recording()
    given, logits = padded((45, 7)), []
    mask = given["attention_mask"]
    model(**given, position_ids=mask.cumsum(-1) - mask, use_cache=True, **kept)
    kept["past_key_values"].crop(-6)
    mask = mask[:, :-6]
    for count in (1, 2, 37):
        mask = torch.cat((mask, mask.new_ones(2, count)), 1)
        given = {
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1)[:, -count:],
        }
        logits.append(
            model(models.prompt(count, 2), **given, use_cache=True, **kept).logits[
                :, -1
            ]
        )
    return SimpleNamespace(sequences=mask, logits=logits)


def each_alone(model: Any) -> Any:
    """Rows with padding on their left; on one process each alone, since some types count blocks from the padding."""
    if hasattr(model, "new_cache"):
        return WAYS["left padding"](model)
    ids, mask = padded_batch().values()
    alone = [
        plain(model, row[None, real.bool()])
        for row, real in zip(ids, mask, strict=True)
    ]
    sequences = [
        pad(each.sequences, (int((real == 0).sum()), 0))
        for each, real in zip(alone, mask, strict=True)
    ]
    logits = [
        torch.cat(each) for each in zip(*(each.logits for each in alone), strict=True)
    ]
    return SimpleNamespace(sequences=torch.cat(sequences), logits=logits)


# From a few tokens to more than an index chooses, a text in parts, and tokens that are taken back.
OF_AN_INDEX: tuple[Any, ...] = (
    read,
    greedy(5),
    greedy(71),
    each_alone,
    WAYS["prompt lookup"],
)
# Less than a pool and just one, a second turn, and rows that change places. States neither skip padding nor go back.
OF_STATES: tuple[Any, ...] = (
    read,
    greedy(3),
    greedy(4),
    WAYS["two turns"],
    WAYS["beams"],
)
OF_POOLS: tuple[Any, ...] = unlike, WAYS["a short second turn"], cropped
# Of a window with entries: transformers takes no token back.
OF_ENTRIES = *OF_AN_INDEX[:-1], WAYS["beams"], WAYS["a short second turn"]
WITHOUT_STATES = " without states"


def ways_of(kind: str) -> tuple[Any, ...]:
    if kind == "deepseek_v4":
        return OF_ENTRIES
    if not kind.startswith(("qwen4", "glm5")):
        return OF_AN_INDEX
    return OF_POOLS if kind.endswith(WITHOUT_STATES) else OF_STATES


def text(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
    }
    return results(lambda model: plain(model.eval(), tiny_tokens(40), **options), model)


def on_ring(mesh: DeviceMesh, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = tiny_model(kind)
    model = rs.parallelize(
        model,
        mesh,
        checkpoint="attention" if model.supports_gradient_checkpointing else "none",
    )
    type(model).ring_prefill_tokens = 9
    return text(model)


@pytest.mark.parametrize(
    "kind",
    [
        "afmoe",  # views what attention returns
        *long(
            "gemma3n_text",  # layers that take the keys of earlier ones
            "gemma4_text",
        ),
        "mllama",  # layers that attend to images alone
        *long(
            "ministral3",  # a factor on queries by position
        ),
    ],
)
def test_the_text_of_special_types_equals_one_process(pool, kind):
    ids, logits = text(tiny_model(kind))
    for found, found_logits in pool.run(on_ring, 2, kind):
        assert torch.equal(found, ids)
        assert (found_logits - logits).norm() < LIMIT * logits.norm()


def choosing(kind: str) -> Any:
    if not kind.endswith(MULTIMODAL):
        changes = (
            {"layer_types": ["indexed_attention"] * 4, "ple_layer_ids": []}
            if kind.endswith(WITHOUT_STATES)
            else {}
        )
        return made(kind.removesuffix(WITHOUT_STATES), torch.float64, **changes)
    model = in_float64_of(tiny_model(kind).eval())
    model.generation_config.pad_token_id = 0
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def choosing_on_ring(
    mesh: DeviceMesh, kind: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    model: Any = rs.parallelize(choosing(kind), mesh)
    type(model).ring_prefill_tokens = -(-SPLIT_FROM_TOKENS // mesh.size())
    return [results(way, model) for way in ways_of(kind)]


def padded_behind(mesh: DeviceMesh) -> None:
    ids = models.prompt(5)
    rs.parallelize(choosing(f"qwen4_exp_text{WITHOUT_STATES}"), mesh).generate(
        ids, attention_mask=1 - torch.eye(5)[3:4]
    )


def test_pools_with_padding_after_tokens_are_refused(pool):
    for outcome in pool.outcomes(padded_behind, 2):
        assert "padding behind tokens" in str(outcome) and "pad on the left" in str(
            outcome
        )


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("deepseek_v32", 1),
        *long(("glm_moe_dsa", 2), ("dots3_note_text", 2), ("qwen4_exp_text", 2)),
        ("qwen4_exp_text without states", 3),
        *long(
            ("glm5_next:multimodal", 2),
            ("qwen4_exp_text", 1),
            ("qwen4_exp_text without states", 1),
            ("qwen4_exp_text without states", 2),
            ("minimax_m3_vl_text", 3),
        ),
        ("deepseek_v4", 2),
        *long(
            ("deepseek_v4", 3),
            ("glm5_next:multimodal", 3),
            ("axk2", 2),
            ("dots3_note:multimodal", 2),
        ),
        *long(
            ("hy_v4", 2),
            ("hy_v4", 3),
            ("mistral_large4:multimodal", 2),
            ("minimax_m3_vl:multimodal", 2),
        ),
    ],
)
def test_an_index_chooses_in_shares_as_in_float64_on_one_process(pool, kind, ranks):
    """Many scores of its few heads are equal."""
    model = choosing(kind)
    expected = [results(way, model) for way in ways_of(kind)]
    for found in pool.run(choosing_on_ring, ranks, kind):
        for (ids, logits), (other, truth) in zip(found, expected, strict=True):
            assert torch.equal(ids, other)
            assert (logits - truth).norm() < IN_FLOAT64 * truth.norm()


def kept(mesh: DeviceMesh, kind: str) -> tuple[int, int, int]:
    """Return the bytes said per rank of a cache of 400 tokens, those of its rows, and of inputs for later entries."""
    model: Any = rs.parallelize(tiny_model(kind).eval(), mesh)
    ids, cache = tiny_tokens(400), model.new_cache()
    said = cache_bytes(model, {"input_ids": ids[:, 1:], "max_new_tokens": 1})
    plain(model, ids, max_new_tokens=1, past_key_values=cache)
    pools = [
        rows._entries
        for layer in cache.layers
        for rows in layer.kept.values()
        if isinstance(rows, Pools)
    ]
    held = [
        *pools,
        *(rows for layer in cache.keepers for rows in layer.rows if rows.count),
    ]
    tails = (
        rows._inputs.stored for layer in cache.layers for rows in layer.kept.values()
    )
    return (
        said,
        sum(rows.stored.nbytes for rows in held),
        sum(inputs.nbytes for inputs in tails),
    )


PLANNED = (
    "deepseek_v3",
    "glm_moe_dsa",
    "minimax_m3_vl_text",
    "deepseek_v4",
    "gemma3n_text",
    "diffllama",
)


@pytest.mark.parametrize("kind", few(["longcat_flash", "qwen4_exp_text", *PLANNED], 2))
def test_a_cache_is_counted_as_what_it_keeps(pool, kind):
    """Latents, not keys of heads; keys of indexes, pools, entries; keys that windows have not left behind."""
    found = pool.run(kept, 2, kind)
    assert [said for said, _, _ in found] == pytest.approx(
        [sum(real for _, real, _ in found) / 2] * 2, rel=0.03
    )
    if kind in PLANNED:
        text = Text(prompt=400, new_tokens=1, ring=2, dtype="float32")
        shape = from_config(tiny_config(kind).to_dict(), kind)
        assert text_bytes(shape, text)[1] == max(
            real + inputs for _, real, inputs in found
        )


def test_a_layer_that_sees_more_than_its_config_is_refused(pool):
    """Of Moshi's window the mask knows nothing, and on one process its cache forgets by it all the same."""
    for outcome in pool.outcomes(on_ring, 2, "moshi"):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "sliding_window" in str(outcome)
