"""From a folder of transformers onto the ring and back: the same tensors bit for bit, and no half of a model."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import ringspan as rs
from ringspan.core.errors import ConfigError
from ringspan.core.files.weights import INDEX, WEIGHTS
from ringspan.generate.folder import base_folder
from ringspan.torch.from_pretrained import _config
from ringspan.torch.model.layers.blockwise.feedforward import (
    find_norms,
    free_feedforwards,
)
from ringspan.torch.model.support import refuse_unsupported
from ringspan.torch.model.view import view_of
from ringspan.torch.model.weights.deferred import deferred, whole
from ringspan.torch.model.weights.files import WeightFiles, folder_of
from ringspan.torch.model.weights.loading import set_aside, unread_model
from ringspan.torch.model.weights.writing import WeightsPlan, put_in_place, scratch_in
from tests.cases import few, long
from tests.every_model.tiny import tiny_model, tiny_tokens
from tests.every_model.weights import differences, stored, there_and_back, written
from tests.torch.model.weights.test_deferred import InMemory

# Plain and tied weights; expert by expert, merged and split while they are loaded; layers that differ; buffers.
KINDS = (
    "llama",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "gemma3n_text",
    "deepseek_v3",
    "phi3",
    "youtu",
)


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes"),
    [
        *few(((kind, 3, {}) for kind in KINDS[::2]), 2),
        *long(
            *((kind, 3, {}) for kind in KINDS[1::2]), *((kind, 2, {}) for kind in KINDS)
        ),
        *long(*((kind, 4, {"tp": 2}) for kind in ("llama", "gemma2"))),
        ("youtu", 4, {"tp": 2}),  # of those that have a plan for it
        ("gpt2", 4, {"replicate": 2}),
        *long(("mixtral", 4, {"replicate": 2})),
        # whose attention is tried out, past experts without values
        (
            "qwen3_5_moe_text",
            2,
            {},
        ),
    ],
)
def test_weights_go_there_and_back(
    pool: Any, tmp_path: Path, kind: str, ranks: int, sizes: dict[str, int]
):
    written(kind, tmp_path / "given")
    wrong = pool.run(
        there_and_back, ranks, str(tmp_path / "given"), str(tmp_path / "saved"), **sizes
    )
    assert wrong == [{}] * ranks


def refused(mesh: Any, folder: str, **options: Any) -> str:
    """Why a folder does not go onto the ring."""
    try:
        rs.from_pretrained(folder, mesh, **options)
    except (rs.RingspanError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil(folder: Path, how: str) -> None:
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    files, places = (
        sorted(folder.glob("model-*.safetensors")),
        json.loads(index.read_text())["weight_map"],
    )
    match how:
        case "truncated":
            os.truncate(files[1], files[1].stat().st_size - 8)
        case "half a header":
            os.truncate(files[1], 100)
        case "damaged":
            files[1].write_bytes(b"\xff" * 8 + files[1].read_bytes()[8:])
        case "a file is missing":
            files[1].unlink()
        case "a tensor is missing":
            tensors = load_file(files[1])
            tensors.pop(sorted(tensors)[0])
            save_file(tensors, files[1])
        case "not in the index either":
            name = min(places)
            file = folder / places.pop(name)
            tensors = load_file(file)
            tensors.pop(name)
            save_file(tensors, file)
            edit(index, {"weight_map": places})
        case "another shape":
            edit(config, {"vocab_size": 101})
        case "quantised":
            edit(
                config,
                {
                    "quantization_config": {
                        "quant_method": "fp8",
                        "weight_block_size": [128, 128],
                    }
                },
            )
        case "no json":
            index.write_text("{")
        case "outside":
            edit(index, {"weight_map": dict.fromkeys(places, "../model.safetensors")})
        case "an adapter":
            for path in (index, *files):
                path.unlink()
            (folder / "adapter_config.json").write_text("{}")
        case "a pickle":
            for path in (index, *files):
                path.unlink()
            (folder / "pytorch_model.bin").write_bytes(b"")
        case "no folder":
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"model-00002\S+: cannot be read, cut or damaged"),
        ("half a header", r"model-00002\S+: cannot be read, cut or damaged"),
        ("damaged", r"model-00002\S+: cannot be read, cut or damaged"),
        (
            "a file is missing",
            r"model-00002\S+: is missing, and the index or config.json names it",
        ),
        (
            "a tensor is missing",
            r"model-00002\S+: has no \S+, which the index says is there",
        ),
        (
            "not in the index either",
            r"has no lm_head\.weight; use the config.json that belongs to the weights",
        ),
        ("another shape", r"is \[97, 64\] there, and \[101, 64\] in the model"),
        (
            "quantised",
            r"llama is quantised \(fp8\), .*dequantise it in one process: from_pretrained\(",
        ),
        ("no json", r"index\.json: cannot be read"),
        (
            "outside",
            r"is in '\.\./model\.safetensors', which is no file of this folder",
        ),
        ("an adapter", r"is an adapter of PEFT"),
        ("a pickle", r"only pytorch_model\.bin, a pickle, which is not opened"),
        ("no folder", r"is no folder, nor to be had from the Hub"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named_on_every_rank(
    pool: Any, tmp_path: Path, how: str, message: str
):
    written("llama", tmp_path / "given")
    spoil(tmp_path / "given", how)
    outcomes = pool.run(refused, 2, str(tmp_path / "given"))
    assert re.search(message, outcomes[0]), outcomes[0]
    assert outcomes[0].startswith(
        "UnsupportedError" if how == "quantised" else "ConfigError"
    ), outcomes[0]
    assert outcomes[1] == outcomes[0]


def one_sided(mesh: Any, folder: str, other: str) -> str:
    return refused(
        mesh, folder if mesh.get_rank() == 0 else other, local_files_only=True
    )


def test_a_folder_that_one_rank_lacks_or_has_otherwise_is_named(
    pool: Any, tmp_path: Path
):
    written("llama", tmp_path / "given")
    written("qwen2", tmp_path / "other")
    outcomes = pool.run(
        one_sided, 2, str(tmp_path / "given"), str(tmp_path / "nowhere")
    )
    assert all("nowhere: is no folder" in each for each in outcomes)
    outcomes = pool.run(one_sided, 2, str(tmp_path / "given"), str(tmp_path / "other"))
    assert all(
        "the ranks were given different tensors in the files" in each
        for each in outcomes
    )


def steps(mesh: Any, folder: str, how: str) -> Any:
    if how == "read":
        model: Any = rs.from_pretrained(folder, mesh, dtype=torch.float32)
    else:
        model = rs.parallelize(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), mesh
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tiny_tokens(37)
    losses = []
    for _ in range(3):
        loss = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    blocks = sorted(
        name
        for name, module in model.named_modules()
        if hasattr(module, "chunk_option")
    )
    return losses, blocks


@pytest.mark.parametrize("kind", ["mixtral", *long("gpt2", "gemma3n_text")])
def test_a_model_that_was_read_trains_as_one_that_was_in_memory(
    pool: Any, tmp_path: Path, kind: str
):
    tiny_model(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    (read, chunked), _ = pool.run(steps, 2, str(tmp_path), "read")
    (held, also_chunked), _ = pool.run(steps, 2, str(tmp_path), "held")
    assert read == held and chunked == also_chunked
    assert len(set(read)) == 3, "it trains"


def overwrite(mesh: Any, source: str, target: str, size: str) -> Any:
    model: Any = rs.from_pretrained(source, mesh)
    model.save_pretrained(target, max_shard_size=size)
    return sorted(path.name for path in Path(target).iterdir())


def test_new_weights_replace_old_ones_and_leave_other_files(pool: Any, tmp_path: Path):
    written("llama", tmp_path / "given")
    target = tmp_path / "saved"
    tiny_model("gpt2").save_pretrained(target)
    (target / "notes.txt").write_text("kept")
    (many, _) = pool.run(overwrite, 2, str(tmp_path / "given"), str(target), "60KB")
    assert (
        "model.safetensors" not in many
        and "model.safetensors.index.json" in many
        and "notes.txt" in many
    )
    assert not differences(stored(target), stored(tmp_path / "given"))
    (one, _) = pool.run(overwrite, 2, str(tmp_path / "given"), str(target), "1GB")
    assert [name for name in one if "safetensors" in name] == ["model.safetensors"]
    assert not differences(stored(target), stored(tmp_path / "given"))


def save_after_a_forward_pass(mesh: Any, source: str, target: str) -> None:
    model: Any = rs.from_pretrained(source, mesh)
    ids = tiny_tokens(37)
    loss = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    model.save_pretrained(target)
    loss.backward()  # the pass is still there


def test_weights_are_saved_between_forward_and_backward(pool: Any, tmp_path: Path):
    written("llama", tmp_path / "given")
    pool.run(
        save_after_a_forward_pass, 2, str(tmp_path / "given"), str(tmp_path / "saved")
    )
    assert not differences(stored(tmp_path / "saved"), stored(tmp_path / "given"))


def cannot_save(mesh: Any, source: str, target: str, how: str) -> str:
    model: Any = rs.from_pretrained(source, mesh)
    usage, write = shutil.disk_usage, WeightsPlan.write

    def fail(self: Any, name: str, folder: Path | None) -> None:
        write(self, name, folder)
        if folder is not None and "00002" in name:
            raise OSError(errno.ENOSPC, "No space left on device", name)

    options = {} if " " in how else dict.fromkeys(how.split("+"), True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as raised:
        if how == "no room":
            patch.setattr(
                shutil, "disk_usage", lambda path: usage(path)._replace(free=1000)
            )
        if how == "disk full":
            patch.setattr(WeightsPlan, "write", fail)
        model.save_pretrained(target, max_shard_size="60KB", **options)
    return f"{raised.typename}: {raised.value}"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no room", "bytes are needed, 1,000 are free; make room"),
        ("disk full", "No space left on device"),
        (
            "state_dict+push_to_hub",
            r"UnsupportedError: save_pretrained\(push_to_hub=True\)",
        ),
        (
            "distributed_checkpoint",
            r"UnsupportedError: save_pretrained\(distributed_checkpoint=True\)",
        ),
    ],
)
def test_an_impossible_save_is_named_and_leaves_old_files(
    pool: Any, tmp_path: Path, how: str, message: str
):
    written("llama", tmp_path / "given")
    tiny_model("qwen2").save_pretrained(tmp_path / "old")
    before = (
        stored(tmp_path / "old"),
        sorted(path.name for path in (tmp_path / "old").iterdir()),
    )
    for problem in pool.run(
        cannot_save, 2, str(tmp_path / "given"), str(tmp_path / "old"), how
    ):
        assert re.search(message, problem), problem
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == before[1]
    assert not differences(stored(tmp_path / "old"), before[0])


def with_adapters(
    mesh: Any, folder: str, out: str, is_read: bool, options: dict[str, Any]
) -> Any:
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], **options
    )

    def adapt(model: Any) -> Any:
        torch.manual_seed(5)
        return get_peft_model(model, config)

    if is_read:
        model: Any = rs.from_pretrained(folder, mesh, adapt=adapt)
    else:
        model = rs.parallelize(
            adapt(AutoModelForCausalLM.from_pretrained(folder)), mesh
        )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    ids = tiny_tokens(21)
    for _ in range(2):
        model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)


@pytest.mark.parametrize(
    "options",
    [{}, *long({"use_dora": True}), {"modules_to_save": ["lm_head", "norm"]}],
    ids=str,
)
def test_adapters_are_added_to_a_model_before_it_is_read(
    pool: Any, tmp_path: Path, options: dict[str, Any]
):
    written("llama", tmp_path / "given")
    for is_read in (True, False):
        pool.run(
            with_adapters,
            2,
            str(tmp_path / "given"),
            str(tmp_path / f"out {is_read}"),
            is_read,
            options,
        )
    found, expected = (stored(tmp_path / f"out {is_read}") for is_read in (True, False))
    assert expected and not differences(found, expected)


def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path):
    """A single file beside an index and shards; a stale index; the file that a config names; an index that names
    another of its files; the first weight by name, whose dtype is the model's where no config says it.
    """
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for number, name in enumerate(
        ("model-00001-of-00001.safetensors", "other.safetensors", WEIGHTS)
    ):
        save_file({"x": torch.tensor([float(number)])}, tmp_path / name)
    assert whole(WeightFiles(tmp_path).tensors["x"]) == 2
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert whole(WeightFiles(tmp_path).tensors["x"]) == 2
    assert (
        whole(
            WeightFiles(
                tmp_path, LlamaConfig(transformers_weights="other.safetensors")
            ).tensors["x"]
        )
        == 1
    )
    with pytest.raises(
        ConfigError, match=r"no model\.fp16\.safetensors; leave variant out"
    ):
        WeightFiles(tmp_path, variant="fp16")
    for name in ("1", "2"):
        save_file(
            {f"{name}.a": torch.ones(1).half(), f"{name}.b": torch.ones(1)},
            tmp_path / name,
        )
    places = {"weight_map": {"1.a": "2", "2.a": "1", "1.b": "1"}}
    (tmp_path / INDEX).write_text(json.dumps(places))
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).symlink_to("nowhere")
    assert list(WeightFiles(tmp_path).tensors) == ["1.a", "1.b", "2.a", "2.b"]
    for folder, why in (
        (tmp_path / "nowhere", "give another subfolder"),
        (tmp_path, "is an adapter of PEFT"),
    ):
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(ConfigError, match=why):
            _config(folder, trust_remote_code=False)
    with pytest.raises(ConfigError, match="has one next to its weights"):
        WeightFiles(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert base_folder(str(tmp_path)) == str(tmp_path)


def test_of_an_id_only_what_is_opened_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = [
        "config.json",
        "fast/config.json",
        f"fast/{WEIGHTS}",
        f"fast/{INDEX}",
        "fast/original/x.safetensors",
    ]
    (tmp_path / "config.json").write_text("{}")
    wanted: list[str] = []
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: names
    )
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **__: tmp_path / "config.json"
    )
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *_, allow_patterns, **__: wanted.extend(allow_patterns) or tmp_path,
    )
    assert folder_of("somebody/model", subfolder="fast") == tmp_path / "fast"
    assert wanted == ["fast/config.json", f"fast/{INDEX}", f"fast/{WEIGHTS}"]


@pytest.mark.parametrize("size", ["1KB", "1GB"])
def test_the_last_file_makes_a_model(
    tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch
):
    """Cut short after any of its moves, a folder is no model."""
    x = torch.arange(1000.0)
    tensors = {
        name: deferred(InMemory(name, x + number)) for number, name in enumerate("abc")
    }
    plan = WeightsPlan(tensors, size)
    folder = tmp_path / "model"
    with scratch_in(folder) as scratch:
        for name in plan.files:
            plan.write(name, scratch)
        plan.write_index(scratch, 3000)
        seen: list[bool] = []
        move = os.replace

        def moved(source: Path, target: Path) -> None:
            seen.append(any((folder / name).exists() for name in (WEIGHTS, INDEX)))
            move(source, target)

        monkeypatch.setattr(os, "replace", moved)
        put_in_place(scratch, folder, plan)
    assert seen == [False] * (len(plan.files) + (len(plan.files) > 1))
    assert not differences(
        stored(folder), {name: x + number for number, name in enumerate("abc")}
    )
    assert WeightFiles(folder).tensors.keys() == set("abc")


def read_by_trials(folder: str) -> dict[str, int]:
    """Numbers that are read before a model is split, by name."""
    found: dict[str, int] = {}

    class Counted(InMemory):
        def read(self, region: Any) -> torch.Tensor:
            part = super().read(region)
            found[self.name] = found.get(self.name, 0) + part.numel()
            return part

    files = WeightFiles(Path(folder))
    files.tensors = {
        name: deferred(Counted(name, x)) for name, x in stored(Path(folder)).items()
    }
    model, _ = unread_model(
        "it", Path(folder), files, AutoConfig.from_pretrained(folder), "auto"
    )
    set_aside(model)
    refuse_unsupported(view_of(model))
    assert free_feedforwards(view_of(model), checkpointed=True) and find_norms(model)
    return found


def test_trials_take_one_layer_and_one_row_of_the_embedding(tmp_path: Path):
    tiny_model("llama").save_pretrained(tmp_path)
    found = read_by_trials(str(tmp_path))
    assert not [name for name in found if ".layers.1." in name]
    assert {
        name.partition(".layers.0.")[2].partition(".")[0]
        for name in found
        if ".layers.0." in name
    } == {
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
    }
    # A row for the head's trial, and one for the layer's.
    assert found["model.embed_tokens.weight"] == 2 * 64
