"""Texts with images that go on over a cache, whoever reads them: positions are those of one process that reads all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.errors import CheckpointError
from ringspan.core.files.signed import file_digest, read_signed, signed
from tests.cases import long
from tests.torch.mechanisms.media.models import IMAGE, VIDEO, batch_of, build
from tests.torch.mechanisms.media.test_generate import SETTINGS, padded_left, prompt

KINDS = [*long("qwen2_5_vl"), "qwen3_vl"]
WORDS: dict[str, Any] = SETTINGS | {"suppress_tokens": [2, IMAGE, VIDEO]}
LATER = torch.tensor([[7, 8, 9, 10]])


def joined(*parts: Any) -> Any:
    """The text and the images of one sequence, in one piece."""
    names = {
        name: 1 if name in ("input_ids", "mm_token_type_ids") else 0
        for part in parts
        for name in part
    }
    return {
        name: torch.cat([part[name] for part in parts if name in part], dim)
        for name, dim in names.items()
    }


def text(ids: Tensor) -> Any:
    return {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}


def parts_of(kind: str) -> list[Any]:
    images = (
        prompt(kind, [[3, "i", 2, "i", 5]]),
        {**batch_of(kind, [[2, "i", 3]], seed=9)},
    )
    del images[1]["labels"]
    return [images[0], text(LATER), images[1], text(LATER + 9)]


def in_passes(mesh: DeviceMesh, kind: str) -> Tensor:
    model: Any = rs.parallelize(build(kind), mesh).eval()
    cache, other = model.new_cache(), model.new_cache()
    found: list[Tensor] = []
    with torch.no_grad():
        for part in parts_of(kind):
            found.append(model(**part, past_key_values=cache).logits)
            # of which nothing stays
            model(**prompt(kind, [["i", 2]]), past_key_values=other)
            other.reset()
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_go_on_behind_images(pool, kind):
    with torch.no_grad():
        expected = build(kind).eval()(**joined(*parts_of(kind))).logits
    for found in pool.run(in_passes, 2, kind):
        assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def padded(kind: str) -> tuple[Any, Any]:
    """Two prompts with padding on their left, and with four tokens more."""
    batch = padded_left(kind, [[3, "i", 2, "i", 5], [2, "i", 2]])
    whole = {**batch}
    for name, more in (
        ("input_ids", LATER),
        ("mm_token_type_ids", LATER * 0),
        ("attention_mask", LATER * 0 + 1),
    ):
        whole[name] = torch.cat((batch[name], more.repeat(2, 1)), 1)
    return batch, whole


def with_padding(mesh: DeviceMesh, kind: str) -> Tensor:
    model: Any = rs.parallelize(build(kind), mesh).eval()
    batch, whole = padded(kind)
    cache = model.new_cache()
    with torch.no_grad():
        model(**batch, past_key_values=cache)
        more = LATER.repeat(2, 1)
        given = {"attention_mask": whole["attention_mask"], "past_key_values": cache}
        first = model(more, **given).logits
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([1, 0]))
        given["attention_mask"] = given["attention_mask"].flip(0)
        second = model(more, **given).logits.flip(0)
    return torch.stack((first, second))


def test_sequences_with_padding_go_on_each_from_its_own_position(pool):
    _, whole = padded("qwen3_vl")
    with torch.no_grad():
        expected = build("qwen3_vl").eval()(**whole).logits[:, -4:]
    for found in pool.run(with_padding, 2, "qwen3_vl"):
        assert torch.allclose(found, expected.expand_as(found), rtol=0, atol=1e-9)


def in_turns(mesh: DeviceMesh, kind: str, folder: str) -> list[Any]:
    """Two conversations by turns, the first one's cache saved and loaded between two of them."""
    model: Any = rs.parallelize(build(kind), mesh).eval()
    images, _, image, _ = parts_of(kind)
    cache, other = model.new_cache(), model.new_cache()
    ids = model.generate(**images, **WORDS, past_key_values=cache).sequences
    model.save_cache(cache, folder)
    model.generate(**text(LATER), **WORDS, past_key_values=other)
    cache = model.load_cache(folder)
    outs = [model.generate(torch.cat((ids, LATER), 1), **WORDS, past_key_values=cache)]
    seen = text(torch.cat((outs[0].sequences, image["input_ids"]), 1))
    seen["mm_token_type_ids"] = (seen["input_ids"] == IMAGE).long()
    outs.append(model.generate(**image | seen, **WORDS, past_key_values=cache))
    return [(out.sequences, torch.stack(out.logits)) for out in outs]


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_by_turns_equal_one_process(pool, kind, tmp_path):
    results = pool.run(in_turns, 2, kind, str(tmp_path / "cache"))
    model = build(kind).eval()
    images, _, image, _ = parts_of(kind)
    pixels = {name: images[name] for name in ("pixel_values", "image_grid_thw")}
    both = joined(pixels, {name: image[name] for name in pixels})
    for turn, given in enumerate((pixels, both)):
        whole, _ = results[0][turn]
        ids = whole[:, : -WORDS["max_new_tokens"]]
        types = (ids == IMAGE).long()
        expected = model.generate(
            input_ids=ids, mm_token_type_ids=types, **given, **WORDS
        )
        for sequences, logits in (result[turn] for result in results):
            assert torch.equal(sequences, expected.sequences)
            assert torch.allclose(
                logits, torch.stack(expected.logits), rtol=0, atol=1e-9
            )


def load_of_before(mesh: DeviceMesh, folder: str, has_images: bool) -> Any:
    """A cache as versions wrote it that kept no positions."""
    model: Any = rs.parallelize(build("qwen2_5_vl"), mesh).eval()
    cache = model.new_cache()
    images, *_ = parts_of("qwen2_5_vl")
    with torch.no_grad():
        model(**images if has_images else text(LATER), past_key_values=cache)
    model.save_cache(cache, folder)
    if mesh["ring"].get_local_rank() == 0:
        path, manifest = (
            Path(folder) / "rank_00000.safetensors",
            Path(folder) / "manifest.json",
        )
        save_file(
            {
                name: value
                for name, value in load_file(path).items()
                if name != "shifts"
            },
            path,
        )
        values = read_signed(manifest, "it was written")
        values["shares"][0] |= {
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
        }
        manifest.write_text(signed(values))
    torch.distributed.barrier(mesh["ring"].get_group())
    return model.load_cache(folder).ids


def test_older_caches_load_if_positions_are_those_of_text(pool, tmp_path):
    assert torch.equal(
        pool.run(load_of_before, 2, str(tmp_path / "text"), False)[0], LATER
    )
    for outcome in pool.outcomes(load_of_before, 2, str(tmp_path / "images"), True):
        assert isinstance(
            outcome, CheckpointError
        ) and "has images, and was saved by an earlier" in str(outcome)
