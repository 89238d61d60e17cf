"""A cache that is saved and loaded, on other ranks too: the next tokens are those of one process that read it all."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.errors import CheckpointError, UnsupportedError
from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.torch.generate.cache import rows
from ringspan.torch.generate.cache.cache import RingCache
from ringspan.torch.generate.cache.quantised import QuantisedRows
from ringspan.torch.generate.cache.rows import Rows
from tests.cases import few, long
from tests.torch.generate import models
from tests.torch.generate.test_generate import plain, results

READ, ASKED, NEW = 83, 21, 6


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
    return answer(
        models.model(name), torch.cat((book(batch), question(batch)), 1), **options
    )


def read_and_save(mesh: DeviceMesh, name: str, folder: Path, batch: int = 1) -> Any:
    model = model_on(mesh, name)
    kept = model.new_cache()
    with torch.no_grad():
        model(
            book(batch),
            attention_mask=padding(batch, READ),
            past_key_values=kept,
            use_cache=True,
            logits_to_keep=1,
        )
    model.save_cache(kept, folder)
    return kept.nbytes


def load_and_ask(
    mesh: DeviceMesh, name: str, folder: Path, batch: int = 1, **options: Any
) -> Any:
    model = model_on(mesh, name)
    kept = model.load_cache(folder)
    assert torch.equal(kept.ids, book(batch))
    shapes = {tuple(layer.keys.shape) for layer in kept.layers}
    before = kept.shares.counts()
    return (
        answer(
            model,
            torch.cat((kept.ids, question(batch)), 1),
            past_key_values=kept,
            **options,
        ),
        before,
        shapes,
    )


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("gpt_oss", (1, 3)),
        *long(
            ("glm_moe_dsa", (3,)),
            ("minimax_m3_vl_text", (3,)),
            ("deepseek_v3", (3,)),
            ("llama4_text", (1, 2, 3)),
        ),
    ],
)
def test_loaded_on_other_ranks_it_goes_on_as_one_process_would(
    pool, tmp_path, name, others
):
    folder = tmp_path / "book"
    pool.run(read_and_save, 2, name, folder)
    for ranks in others:
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


def load(
    mesh: DeviceMesh, name: str, folder: Path, changes: dict[str, object], seed: int
) -> None:
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
    "a bit": (
        lambda folder: flip(folder / "rank_00001.safetensors"),
        "rank_00001.safetensors: has sha256 .* damaged",
    ),
    "cut": (
        lambda folder: (path := folder / "rank_00000.safetensors").write_bytes(
            path.read_bytes()[:-9]
        ),
        r"rank_00000.safetensors: has \d+ bytes, expected \d+",
    ),
    "a missing file": (
        lambda folder: (folder / "rank_00001.safetensors").unlink(),
        "rank_00001.safetensors: is missi",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "manifest.json: is missing",
    ),
    "a changed manifest": (
        edit_manifest,
        "manifest.json: changed after it was written",
    ),
}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "book"
    pool.run(read_and_save, 2, "llama", folder)
    return folder


@pytest.mark.parametrize("damage", few(DAMAGE, 3))
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
        ("qwen3", {}, 0, "of a LlamaForCausalLM, must be of a Qwen3ForCausalLM"),
        *long(
            ("llama", {"num_key_value_heads": 4}, 0, "num_key_value_heads=2, not 4"),
            ("llama", {"rope_theta": 7.0}, 0, "rope_"),
        ),
        ("llama", {}, 1, "other weights"),
    ],
)
def test_the_cache_of_another_model_is_refused_on_every_rank(
    pool, saved, name, changes, seed, says
):
    for outcome in pool.outcomes(load, 2, name, saved, changes, seed):
        with pytest.raises(CheckpointError, match=says):
            raise outcome


def change(model: Any, how: str) -> None:
    """Change the weights of a model in one of the ways that there are."""
    weights = list(model.parameters())
    if how == "optimizer":  # whose foreach steps PyTorch does not count
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        torch.optim.SGD(weights, lr=1e-3, foreach=True).step()
    elif how == "load_state_dict":
        model.load_state_dict(
            {name: weight * 1.01 for name, weight in model.state_dict().items()}
        )
    elif how == "in place":
        with torch.no_grad():
            weights[3].add_(1e-3)
    elif how == "data":
        for weight in weights:
            weight.data.mul_(1.01)
    elif how == "buffer":
        model.model.bias.add_(1)


def read_and_go_on(mesh: DeviceMesh, folder: Path) -> list[str]:
    """What is said to whoever goes on with a cache that was read otherwise."""
    said: list[str] = []

    def expect(call: Any) -> None:
        with pytest.raises((UnsupportedError, CheckpointError)) as raised:
            call()
        said.append(str(raised.value))

    def go_on(model: Any, kept: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.generate(
            torch.cat((ids, question()), 1), past_key_values=kept, max_new_tokens=2
        )

    plain = models.model("llama")
    plain.model.register_buffer("bias", torch.zeros(3))
    model, other = rs.parallelize(plain, mesh), model_on(mesh, "llama")
    kept = other.new_cache()  # empty: it does not matter whose
    ids = go_on(model, kept, book())
    with torch.no_grad():
        model(**rs.shard_batch({"input_ids": book(), "labels": book()}, mesh))
    ids = go_on(model, copy.deepcopy(kept), ids)
    expect(lambda: go_on(other, kept, ids))
    for how in ("optimizer", "load_state_dict", "in place", "data", "buffer"):
        kept = model.generate(
            book(), max_new_tokens=2, return_dict_in_generate=True
        ).past_key_values
        change(model, how)
        expect(lambda kept=kept: model.save_cache(kept, folder / "old"))
        with torch.no_grad():
            expect(lambda kept=kept: model(question(), past_key_values=kept))
    lora = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False
    )
    adapted: Any = get_peft_model(models.model("llama"), lora)
    adapted.add_adapter("b", lora)
    adapted = rs.parallelize(adapted.eval(), mesh)
    kept = adapted.new_cache()
    ids = adapted.generate(input_ids=book(), past_key_values=kept, max_new_tokens=2)
    with adapted.disable_adapter():
        expect(lambda: go_on(adapted.get_base_model(), kept, ids))
    adapted.save_cache(kept, folder / "a")
    adapted.load_cache(folder / "a")
    adapted.set_adapter("b")
    expect(lambda: go_on(adapted.get_base_model(), kept, ids))
    expect(lambda: adapted.load_cache(folder / "a"))
    return said


def test_a_cache_needs_its_model_weights_and_adapters(pool, tmp_path):
    weights = (
        "tokens in the cache were read before the weights changed; read the text again"
    )
    expected = [
        "by another model; read",
        *[weights] * 10,
        "(default x 1.0, now none)",
        "(default x 1.0, now b x 1.0)",
    ]
    for said in pool.run(read_and_go_on, 2, tmp_path):
        for line, part in zip(
            said, [*expected, "with adapters=default x 1.0"], strict=True
        ):
            assert part in line, said


def save_badly(mesh: DeviceMesh, case: str, folder: Path) -> None:
    from transformers import DynamicCache

    model = model_on(mesh, "llama")
    kept = model.new_cache()
    if case == "another's":
        kept = DynamicCache()
    elif case != "empty":
        ids = models.prompt(
            33, seed=mesh["replicate"].get_local_rank() if case == "replicas" else 0
        )
        model.generate(ids, past_key_values=kept, max_new_tokens=2)
    model.save_cache(kept, folder)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("another's", "DynamicCache"),
        *long(("empty", "is empty"), ("exists", "exists; remove it")),
        ("replicas", "different tokens"),
    ],
)
def test_what_cannot_be_saved_is_refused_on_every_rank(pool, tmp_path, case, says):
    folder = tmp_path / "book"
    if case == "exists":
        folder.mkdir()
    for outcome in pool.outcomes(
        save_badly, 2, case, folder, replicate=2 if case == "replicas" else 1
    ):
        assert isinstance(outcome, ValueError), outcome
        with pytest.raises(ValueError, match=says):
            raise outcome
    assert [path.name for path in tmp_path.iterdir()] == (
        ["book"] if case == "exists" else []
    )


def tokens_noted(mesh: DeviceMesh) -> list[bool]:
    """The cache knows the tokens that it holds."""
    model = model_on(mesh, "llama")
    right = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        kept = model.new_cache()
        ids = model.generate(
            book().repeat(1, 2), past_key_values=kept, max_new_tokens=NEW, **options
        )
        right.append(
            torch.equal(kept.ids[: len(ids)], ids[:, : kept.ids.shape[1]])
            and kept.ids.shape[1] > 2 * READ
        )
    return right


@pytest.mark.long
def test_the_tokens_are_noted_through_crops(pool):
    assert pool.run(tokens_noted, 2) == [[True, True]] * 2


def moved(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Shapes of codes of keys and values that are moved to a larger place while a text is read and written."""
    model = model_on(mesh, "llama")
    kept = model.new_cache("int8")
    with mock.patch.object(rows, "_with_room", side_effect=rows._with_room) as made:
        model.generate(
            models.prompt(231),
            past_key_values=kept,
            max_new_tokens=60,
            min_new_tokens=60,
        )
    assert made.called
    olds = [call.args[0] for call in made.call_args_list]
    return [
        tuple(old.shape)
        for old in olds
        if old.shape[3] > 2 and old.shape[2] and old.dtype == torch.int8
    ]


@pytest.mark.long
def test_nothing_is_moved_while_a_text_is_read_and_written(pool):
    """A second copy of a layer's keys would be the largest thing beside a long cache."""
    assert pool.run(moved, 2) == [[], []]


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_rows_in_fewer_bits_are_rounded_once(dtype):
    """Against plain rows, through appends of all sizes and cuts at both ends: within half a step, the last exact."""
    torch.manual_seed(0)
    rows, plain = QuantisedRows(dtype), Rows()
    steps = (
        (5, 0, 0),
        (200, 0, 3),
        (64, 70, 0),
        (1, 1, 0),
        (63, 0, 60),
        (129, 130, 64),
        (300, 64, 9),
    )
    largest = 0.0
    for added, first, last in steps:
        new = torch.randn(2, 3, added, 8)
        largest = max(largest, float(new.abs().amax()))
        for each in (rows, plain):
            each.append(new)
        assert torch.equal(rows.tensor[:, :, -min(added, 64) :], new[:, :, -64:])
        for each in (rows, plain):
            each.cut(first, last)
        assert rows.count == plain.count
        assert rows.tensor.shape == plain.tensor.shape
        error = (rows.tensor - plain.tensor).abs()
        assert (
            float(error.amax())
            <= 0.5001 * largest * {"fp8": 1 / 14, "int8": 1 / 127, "int4": 1 / 7}[dtype]
        )
    assert float(error.amax()) > 0, "some are in blocks"
    before = rows.tensor
    for each in (rows, plain):
        each.cut(0, 150)
    assert torch.equal(rows.tensor, before[:, :, :-150]), (
        "blocks that are opened again are not rounded anew"
    )
    rows.change(lambda x: x.flip(0))
    assert torch.equal(rows.tensor, before[:, :, :-150].flip(0))
    rows.cut(rows.count, 0)
    assert rows.tensor.shape[2] == rows.count == 0


@pytest.mark.parametrize(("dtype", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4)])
def test_bytes_are_codes_and_a_scale_per_head_and_block(dtype, bits):
    """Of 4,160 tokens 4,096 are in 64 blocks; 64 keep bfloat16."""
    rows, plain = QuantisedRows(dtype), Rows()
    for each in (rows, plain):
        each.append(torch.randn(1, 2, 4160, 128).bfloat16())
    assert plain.nbytes == 2 * 4160 * 128 * 2
    assert rows.nbytes == 2 * 4096 * 128 * bits // 8 + 2 * 64 * 4 + 2 * 64 * 128 * 2
    in_blocks = rows.nbytes - 2 * 64 * 128 * 2
    assert in_blocks / (2 * 4096 * 128 * 2) == bits / 16 + 4 / (64 * 128 * 2)


LONG = 331  # on two ranks two blocks each and a tail


def over(
    model: Any, dtype: str | None, way: str, new: int = NEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """A text after a long prompt, over a cache of a dtype, and its logits."""
    options = {
        "beams": {"num_beams": 3},
        "crop": {"prompt_lookup_num_tokens": 4},
        "greedy": {},
    }[way]
    if dtype is not None:
        options["past_key_values"] = model.new_cache(None if dtype == "own" else dtype)
    ids = (
        models.prompt(30).repeat(1, 11)[:, :LONG]
        if way == "crop"
        else models.prompt(LONG)
    )
    return results(
        lambda model: plain(model, ids, max_new_tokens=new, **options), model
    )


def over_all(
    mesh: DeviceMesh, name: str, dtypes: list[str], way: str, new: int = NEW
) -> Any:
    model = model_on(mesh, name)
    return [over(model, dtype, way, new) for dtype in dtypes]


BOUNDS = {"float32": 1e-5, "bfloat16": 0.02, "fp8": 0.1, "int8": 0.03, "int4": 0.6}


@pytest.mark.parametrize("name", ["gpt_oss", *long("llama")])
def test_the_first_logits_are_within_a_bound(pool, name):
    """Of random weights, whose attention is sharper than a trained model's."""
    _, whole = over(models.model(name), None, "greedy", 1)
    for got in pool.run(over_all, 2, name, list(BOUNDS), "greedy", 1):
        errors = [
            float((logits[0] - whole[0]).norm() / whole[0].norm()) for _, logits in got
        ]
        for (dtype, bound), error in zip(BOUNDS.items(), errors, strict=True):
            assert error < bound, dtype
            assert (error > 1e-5) == (dtype != "float32"), "it is rounded"


@pytest.mark.parametrize("way", ["beams", *long("crop")])
def test_beams_and_crops_in_eight_bits(pool, way):
    ids, _ = over(models.model("llama"), None, way)
    for ((got, _),) in pool.run(over_all, 2, "llama", ["int8"], way):
        assert torch.equal(got, ids)


def costs(mesh: DeviceMesh, folder: Path) -> Any:
    model = model_on(mesh, "llama")
    kept = model.load_cache(folder, "int8")
    assert kept.dtype == "int8"
    return [
        model.cache_cost(models.prompt(700), dtype, scored=100)
        for dtype in ("float32", "int8", "int4")
    ]


@pytest.mark.long
def test_the_cost_of_fewer_bits_is_measured(pool, tmp_path):
    pool.run(read_and_save, 2, "llama", tmp_path / "book")
    for same, int8, int4 in pool.run(costs, 2, tmp_path / "book"):
        assert same.loss == same.loss_then == int8.loss and same.logits_error == 0
        assert 0 < abs(int8.loss_then - int8.loss) < 0.02
        assert int8.logits_error < int4.logits_error
        assert int8.cache_bytes > int8.cache_bytes_then > int4.cache_bytes_then
        assert int8.perplexity == pytest.approx(2.718281828**int8.loss)


def other_dtype(mesh: DeviceMesh, case: str) -> None:
    model = model_on(mesh, "llama")
    dtype = "int3" if case == "unknown" else ("int8", "int4")[mesh.get_rank()]
    model.generate(book(), past_key_values=model.new_cache(dtype), max_new_tokens=2)


@pytest.mark.parametrize(
    ("case", "says"),
    [("unknown", "'int3'"), ("different", "different past_key_values")],
)
def test_dtypes_that_do_not_fit_raise_on_every_rank(pool, case, says):
    for outcome in pool.outcomes(other_dtype, 2, case):
        assert isinstance(outcome, ValueError), outcome
        with pytest.raises(ValueError, match=says):
            raise outcome


def test_a_model_that_adds_layers_to_its_cache_does_not_generate():
    cache = RingCache([LayerMask(), LayerMask()], ranks=1, rank=0)
    cache.check_updated("Plain")
    cache.layers += cache.layers[:1]
    with pytest.raises(UnsupportedError, match="Looped does not generate on a ring"):
        cache.check_updated("Looped")
