"""A cache that is saved and loaded, on other ranks too: the next tokens are those of one process that read it all."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.errors import CheckpointError
from tests.torch.generate import models

READ, ASKED, NEW = 83, 21, 10
KINDS = ("llama", "mistral", "gpt_oss", "deepseek_v3", "llama4_text")


def book(batch: int = 1) -> torch.Tensor:
    return models.prompt(READ, batch=batch)


def question(batch: int = 1) -> torch.Tensor:
    return models.prompt(ASKED, batch=batch)


def padding(batch: int, length: int) -> torch.Tensor:
    """Of a batch of several, all but the last begin with padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, : 5 + 3 * row] = 0
    return mask


def model_on(mesh: DeviceMesh, name: str, **changes: object) -> Any:
    model: Any = rs.parallelize(models.model(name, **changes), mesh)
    type(model).ring_prefill_tokens = 23
    return model


def answer(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    mask = padding(len(ids), ids.shape[1])
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)


@cache
def expected(name: str, batch: int = 1, **options: Any) -> torch.Tensor:
    return answer(models.model(name), torch.cat((book(batch), question(batch)), 1), **options)


def read_and_save(mesh: DeviceMesh, name: str, folder: Path, batch: int = 1) -> Any:
    model = model_on(mesh, name)
    kept = model.new_cache()
    with torch.no_grad():
        model(book(batch), attention_mask=padding(batch, READ), past_key_values=kept, use_cache=True, logits_to_keep=1)
    model.save_cache(kept, folder)
    return kept.nbytes


def load_and_ask(mesh: DeviceMesh, name: str, folder: Path, batch: int = 1, **options: Any) -> Any:
    model = model_on(mesh, name)
    kept = model.load_cache(folder)
    assert torch.equal(kept.ids, book(batch))
    shapes = {tuple(layer.keys.shape) for layer in kept.layers}
    before = kept.shares.counts()
    return answer(model, torch.cat((kept.ids, question(batch)), 1), past_key_values=kept, **options), before, shapes


@pytest.mark.parametrize("name", KINDS)
def test_loaded_on_other_ranks_it_goes_on_as_one_process_would(pool, tmp_path, name):
    folder = tmp_path / "book"
    pool.run(read_and_save, 2, name, folder)
    for ranks in (1, 2, 3):
        for ids, counts, _ in pool.run(load_and_ask, ranks, name, folder):
            assert torch.equal(ids, expected(name)), ranks
            assert sum(counts) == READ and max(counts) - min(counts) <= 1


def test_loaded_by_replicas_and_with_split_heads(pool, tmp_path):
    folder, split = tmp_path / "book", tmp_path / "split"
    pool.run(read_and_save, 2, "llama", folder)
    for mesh in ({"replicate": 2}, {"tp": 2}):
        for ids, _, _ in pool.run(load_and_ask, 4, "llama", folder, **mesh):
            assert torch.equal(ids, expected("llama")), mesh
    pool.run(read_and_save, 4, "llama", split, tp=2)
    for ids, _, shapes in pool.run(load_and_ask, 1, "llama", split):
        assert torch.equal(ids, expected("llama"))
        assert shapes == {(1, 2, READ, 8)}, "the heads of both"


def test_a_batch_with_padding(pool, tmp_path):
    folder = tmp_path / "books"
    pool.run(read_and_save, 3, "gpt_oss", folder, 3)
    for ids, _, _ in pool.run(load_and_ask, 2, "gpt_oss", folder, 3):
        assert torch.equal(ids, expected("gpt_oss", 3))


def test_a_window_keeps_what_it_needs(pool, tmp_path):
    """Of Mistral's window of 9, eight keys can still be seen: on disk, and loaded, no rank has more."""
    folder = tmp_path / "book"
    pool.run(read_and_save, 2, "mistral", folder)
    layers = json.loads((folder / "manifest.json").read_text())["manifest"]["layers"]
    assert {layer["first"] for layer in layers} == {READ - 8}
    held = [shapes for _, _, shapes in pool.run(load_and_ask, 3, "mistral", folder)]
    assert sum(shape[2] for shapes in held for shape in shapes) == 8


def load(mesh: DeviceMesh, name: str, folder: Path, changes: dict[str, object], seed: int) -> None:
    plain: Any = models.model(name, **changes)
    if seed:
        with torch.no_grad():
            plain.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    rs.parallelize(plain, mesh).load_cache(folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"length": 83', '"length": 84'))


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "rank_00001.safetensors"), "rank_00001.safetensors: has sha256 .* damaged"),
    "cut": (
        lambda folder: (path := folder / "rank_00000.safetensors").write_bytes(path.read_bytes()[:-9]),
        r"rank_00000.safetensors: has \d+ bytes, expected \d+",
    ),
    "a missing file": (lambda folder: (folder / "rank_00001.safetensors").unlink(), "rank_00001.safetensors: is missi"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: is missing"),
    "a changed manifest": (edit_manifest, "manifest.json: changed after it was written"),
}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "book"
    pool.run(read_and_save, 2, "llama", folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_on_every_rank(pool, saved, tmp_path, damage):
    folder = tmp_path / "book"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    harm, says = DAMAGE[damage]
    harm(folder)
    for outcome in pool.outcomes(load, 3, "llama", folder, {}, 0):
        with pytest.raises(CheckpointError, match=says):
            raise outcome


@pytest.mark.parametrize(
    ("name", "changes", "seed", "says"),
    [
        ("qwen3", {}, 0, "of a LlamaForCausalLM, not of a Qwen3ForCausalLM"),
        ("llama", {"num_key_value_heads": 4}, 0, "num_key_value_heads=2, not 4"),
        ("llama", {"rope_theta": 7.0}, 0, "rope_"),
        ("llama", {}, 1, "other weights"),
    ],
)
def test_the_cache_of_another_model_is_refused_on_every_rank(pool, saved, name, changes, seed, says):
    for outcome in pool.outcomes(load, 2, name, saved, changes, seed):
        with pytest.raises(CheckpointError, match=says):
            raise outcome


def save_badly(mesh: DeviceMesh, case: str, folder: Path) -> None:
    from transformers import DynamicCache

    model = model_on(mesh, "llama")
    kept = model.new_cache()
    if case == "another's":
        kept = DynamicCache()
    elif case != "empty":
        ids = models.prompt(33, seed=mesh["replicate"].get_local_rank() if case == "replicas" else 0)
        model.generate(ids, past_key_values=kept, max_new_tokens=2)
    model.save_cache(kept, folder)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("another's", "DynamicCache"),
        ("empty", "is empty"),
        ("exists", "exists; remove it"),
        ("replicas", "different tokens"),
    ],
)
def test_what_cannot_be_saved_is_refused_on_every_rank(pool, tmp_path, case, says):
    folder = tmp_path / "book"
    if case == "exists":
        folder.mkdir()
    for outcome in pool.outcomes(save_badly, 2, case, folder, replicate=2 if case == "replicas" else 1):
        assert isinstance(outcome, ValueError), outcome
        with pytest.raises(ValueError, match=says):
            raise outcome
    assert [path.name for path in tmp_path.iterdir()] == (["book"] if case == "exists" else [])


def tokens_noted(mesh: DeviceMesh) -> list[bool]:
    """The cache knows the tokens that it holds."""
    model = model_on(mesh, "llama")
    right = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        kept = model.new_cache()
        ids = model.generate(book().repeat(1, 2), past_key_values=kept, max_new_tokens=NEW, **options)
        right.append(torch.equal(kept.ids[: len(ids)], ids[:, : kept.ids.shape[1]]) and kept.ids.shape[1] > 2 * READ)
    return right


def test_the_tokens_are_noted_through_crops(pool):
    assert pool.run(tokens_noted, 2) == [[True, True]] * 2
