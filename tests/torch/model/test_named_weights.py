"""The weights that a ring hands over are bit for bit those that transformers and PEFT write on one process."""

import errno
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import ringspan as rs
from ringspan.core.errors import ConfigError, PeerMismatch, UnsupportedError
from ringspan.torch.model import named_weights as module
from ringspan.torch.model.layers.modules import local_part
from ringspan.torch.model.weights import writing
from tests.cases import long
from tests.every_model.weights import differences, stored
from tests.torch.model.test_four_bits import Living, adapted, opened
from tests.torch.model.test_peft import ADAPTERS, EXPERTS, adapt, stir
from tests.torch.models import build, tokens

CASES = {**ADAPTERS, "experts": ("gpt_oss", EXPERTS)}
# Two layers share a weight, an adapter changes one, and PEFT's own merge changes both.
PARTED = ("tied head", "gemma")
Found = tuple[list[module.WeightMeta], dict[str, Tensor]]


def plain(kind: str) -> Any:
    return build(kind, **({"tie_word_embeddings": True} if kind == "qwen3" else {}))


def wrapped(case: str) -> Any:
    kind, options = CASES[case]
    return adapt(kind, options)


def packed(folder: Path, bits: str) -> Any:
    return adapted(opened(folder, bits))


def files_of(model: Any) -> dict[str, Tensor]:
    """What one process writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return stored(Path(folder))


def handed(
    mesh: DeviceMesh,
    make: Callable[..., Any],
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Found:
    """What is said of a ring's weights, and the weights, which leave the shards as they were."""
    model = rs.parallelize(make(*given), mesh)
    before = {n: local_part(p).detach().clone() for n, p in model.named_parameters()}
    weights = rs.named_weights(model, **options)
    found, again = dict(weights), dict(weights)
    after = {n: local_part(p).detach() for n, p in model.named_parameters()}
    assert not differences(after, before)
    if any(tensor.is_meta for tensor in found.values()):
        assert not options.get("everywhere") and mesh.get_rank() > 0
        assert all(tensor.is_meta for tensor in found.values())
        return weights.metadata(), {}
    assert not differences(again, found)
    return weights.metadata(), found


def check(
    outcomes: list[Found], expected: dict[str, Tensor], *, everywhere: bool
) -> None:
    for rank, (said, found) in enumerate(outcomes):
        about = {name: (dtype, shape) for name, dtype, shape in said}
        assert about == {n: (x.dtype, tuple(x.shape)) for n, x in expected.items()}
        assert [name for name, _, _ in said] == list(found or about)
        if rank == 0 or everywhere:
            assert not differences(found, expected)


@pytest.mark.parametrize(
    ("kind", "ranks", "sizes", "everywhere"),
    [
        *long(("llama", 1, {}, False)),
        ("qwen3", 2, {}, True),
        *long(("qwen3_moe", 2, {}, False)),
        ("llama", 4, {"tp": 2}, True),
        ("gpt_oss", 4, {"replicate": 2}, True),
        *long(
            ("llama", 2, {}, False),
            ("qwen3", 1, {}, True),
            ("qwen3_moe", 3, {}, True),
            ("llama", 2, {"tp": 2}, False),
            ("gemma3n_text", 2, {}, True),
            ("deepseek_v3", 4, {"replicate": 2}, False),
        ),
    ],
)
def test_weights_are_those_of_the_files(pool, kind, ranks, sizes, everywhere):
    options = {"everywhere": everywhere}
    outcomes = pool.run(handed, ranks, plain, (kind,), options, **sizes)
    check(outcomes, files_of(plain(kind)), everywhere=everywhere)


@pytest.mark.parametrize(
    ("case", "ranks", "sizes"),
    [
        ("all-linear", 2, {}),
        ("attention", 4, {"tp": 2}),
        *long(("tied tokens", 1, {})),
        ("experts", 2, {}),
        *long(*((case, 2, {}) for case in CASES if case not in PARTED)),
    ],
)
def test_merged_weights_are_those_that_peft_merges(pool, case, ranks, sizes):
    outcomes = pool.run(handed, ranks, wrapped, (case,), {"everywhere": True}, **sizes)
    check(outcomes, files_of(wrapped(case).merge_and_unload()), everywhere=True)


def test_a_layer_that_shared_its_weight_has_its_own_once_merged(pool):
    model = wrapped("tied head")
    layer = model.get_base_model().lm_head
    with torch.no_grad():
        expected = layer.weight + layer.get_delta_weight("default")
    for _, found in pool.run(handed, 2, wrapped, ("tied head",), {"everywhere": True}):
        assert torch.equal(found["lm_head.weight"], expected)
        assert torch.equal(found["model.embed_tokens.weight"], layer.weight)


def scaled(case: str) -> Any:
    """Two adapters, both active, one of them with another scale than its settings say."""
    model = wrapped(case)
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    stir(model)
    for layer in model.modules():
        if hasattr(layer, "set_scale") and "second" in layer.scaling:
            layer.set_scale("second", 0.25)
    return model


def test_the_adapters_in_use_are_merged_with_their_scales(pool):
    outcomes = pool.run(handed, 2, scaled, ("attention",), {})
    check(outcomes, files_of(scaled("attention").merge_and_unload()), everywhere=False)


@pytest.mark.parametrize(
    "case", ["all-linear", "saved ends", *long("dora", "tied tokens", "experts")]
)
def test_an_adapter_alone_has_the_names_of_its_file(pool, case):
    outcomes = pool.run(handed, 2, wrapped, (case,), {"only": "adapter"})
    check(outcomes, files_of(wrapped(case)), everywhere=False)


def test_without_merging_the_base_is_handed_over(pool):
    outcomes = pool.run(handed, 2, wrapped, ("head",), {"merge": False})
    check(outcomes, files_of(wrapped("head").unload()), everywhere=False)


def unpacked(model: Any) -> dict[str, Tensor]:
    """What a packed model with an adapter computes with, layer by layer."""
    found: dict[str, Tensor] = {}
    for path, layer in model.get_base_model().named_modules():
        if hasattr(layer, "get_delta_weight"):
            weight = layer.get_base_layer().weight
            if hasattr(weight, "quant_state"):
                numbers = dequantize_4bit(weight.data, weight.quant_state)
            else:
                scales = layer.get_base_layer().state.SCB
                scales = weight.SCB if scales is None else scales
                numbers = int8_vectorwise_dequant(weight.data, scales)
            with torch.no_grad():
                found[f"{path}.weight"] = numbers + layer.get_delta_weight("default")
        elif not list(layer.children()) and "base_layer" not in path:
            for name, parameter in layer.named_parameters(recurse=False):
                if "lora_" not in path:
                    found[f"{path}.{name}"] = parameter.detach()
    return found


@pytest.mark.parametrize(
    ("bits", "ranks"),
    [("nf4, scales packed", 2), *long(("int8", 2), ("nf4 in bfloat16", 1))],
)
def test_packed_weights_are_unpacked_and_merged(pool, tmp_path, bits, ranks):
    build("llama").save_pretrained(tmp_path)
    outcomes = pool.run(handed, ranks, packed, (tmp_path, bits), {"everywhere": True})
    check(outcomes, unpacked(packed(tmp_path, bits)), everywhere=True)


def test_parameters_are_cast(pool):
    outcomes = pool.run(handed, 2, plain, ("llama",), {"dtype": torch.bfloat16})
    check(outcomes, files_of(plain("llama").bfloat16()), everywhere=False)


def after_steps(mesh: DeviceMesh) -> list[bool]:
    """Whether an object that was asked before each step has the weights of after it."""
    model = rs.parallelize(wrapped("attention"), mesh)
    weights = rs.named_weights(model, everywhere=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    ids = tokens(1, 24)
    same = []
    for _ in range(2):
        before = dict(weights)
        model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = dict(weights)
        # A pass without a backward pass leaves copies of the outermost weights.
        model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))
        same.append(
            not differences(now, dict(rs.named_weights(model, everywhere=True)))
        )
        same.append(bool(differences(now, before)))
    return same


def test_each_iteration_reads_the_weights_of_its_time(pool):
    assert pool.run(after_steps, 2) == [[True] * 4] * 2


def peaks(
    mesh: DeviceMesh, case: str, sizes: dict[str, int], everywhere: bool
) -> tuple[float, float]:
    """The most bytes beside the model during an iteration, in largest tensors; and those that stay."""
    kind, options = CASES[case]
    model = rs.parallelize(adapt(kind, options, hidden_size=128, **sizes), mesh)
    weights = rs.named_weights(model, everywhere=everywhere)
    largest = max(math.prod(each.shape) * 4 for each in weights.metadata())
    with Living() as tracker:
        for _name, tensor in weights:
            del tensor
    bytes_now = tracker.moments[-1].total_bytes
    return tracker.peak.total_bytes / largest, bytes_now / largest


# PEFT's own arithmetic takes a weight, and its difference before and after it is scaled.
@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"vocab_size": 1024, "intermediate_size": 512}, 1.7),
        ({"vocab_size": 128, "intermediate_size": 512}, 3.2),
    ],
    ids=["embeddings are the largest", "merged weights are the largest"],
)
@pytest.mark.parametrize("everywhere", [False, *long(True)])
def test_memory_beside_the_model_is_that_of_tensors(pool, sizes, most, everywhere):
    first, other = pool.run(peaks, 2, "all-linear", sizes, everywhere)
    assert 1 < first[0] < most and first[1] < 0.01
    assert other[0] < (most if everywhere else 0.3) and other[1] < 0.01


def leaving(mesh: DeviceMesh, bucket_bytes: int) -> list[str]:
    """What a rank reads where the first leaves after two tensors, and what an iteration then gives."""
    weights = rs.named_weights(rs.parallelize(plain("llama"), mesh))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BUCKET_BYTES", bucket_bytes)
        try:
            for name, _ in weights:
                seen.append(name)
                if mesh.get_rank() == 0 and len(seen) == 2:
                    break
        except rs.RingspanError as error:
            seen.append(f"{type(error).__name__}: {error}")
        assert len(dict(weights)) == len(weights)
    return seen


def test_a_rank_that_leaves_early_is_named_on_the_others(pool):
    two, whole = pool.run(leaving, 2, 30_000)
    names = list(files_of(plain("llama")))
    assert len(two) == 2
    *read, said = whole
    assert 2 <= len(read) < len(names) / 2, "no rank is further ahead than a bucket"
    assert said == (
        f"ConfigError: rank 0 stopped reading the weights after {two[-1]}; read all of them on every rank"
    )


def refused(mesh: DeviceMesh, how: str) -> None:
    model: Any = plain("llama") if how != "several" else scaled("attention")
    if how != "no ring":
        rs.parallelize(model, mesh)
    if how == "own":  # as transformers' own add_adapter leaves it
        model._hf_peft_config_loaded = True
    given: dict[str, Any] = {
        "unknown": {"only": "lora"},
        "no adapter": {"only": "adapter"},
        "several": {"only": "adapter"},
        "integers": {"dtype": torch.int8},
        "apart": {"everywhere": mesh.get_rank() == 0},
    }.get(how, {})
    if how == "one rank":
        given = {"only": "lora"} if mesh.get_rank() else {}
    rs.named_weights(model, **given)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("no ring", ConfigError, "is not on a ring; call parallelize first"),
        ("unknown", ConfigError, "only='lora'; use 'adapter', or leave it out"),
        ("one rank", ConfigError, "only='lora'; use 'adapter', or leave it out"),
        ("no adapter", ConfigError, "LlamaForCausalLM has none"),
        ("several", ConfigError, r"are active; set one of them by set_adapter"),
        ("integers", ConfigError, "dtype=torch.int8; use one of floating-point"),
        ("own", UnsupportedError, "holds adapters itself"),
        ("apart", PeerMismatch, "the ranks were given different everywhere"),
    ],
)
def test_refusals_are_those_of_every_rank(pool, how, kind, message):
    for outcome in pool.outcomes(refused, 2, how):
        assert type(outcome) is kind and message in str(outcome)


def filling(mesh: DeviceMesh, folder: Path, free: int) -> None:
    """Write where the disk has so much room, or fills up during the first file."""
    weights = rs.named_weights(rs.parallelize(plain("llama"), mesh))
    folder = folder if mesh.get_rank() == 0 else None  # pyright: ignore[reportAssignmentType]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with pytest.MonkeyPatch.context() as patch:
        if free:
            patch.setattr(writing.os, "fsync", full)
        else:
            usage = SimpleNamespace(free=free)
            patch.setattr(writing.shutil, "disk_usage", lambda _: usage)
        weights.write(folder)


@pytest.mark.parametrize("free", [0, 1])
def test_a_full_disk_is_named_on_every_rank(pool, tmp_path, free):
    first, other = pool.outcomes(filling, 2, tmp_path, free)
    assert isinstance(first, OSError) and first.errno == errno.ENOSPC
    assert isinstance(other, PeerMismatch) and str(first) in str(other)


def test_a_folder_that_is_written_opens(pool, tmp_path):
    pool.run(written, 2, tmp_path)
    assert not differences(stored(tmp_path), files_of(plain("llama")))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(opened.lm_head.weight, plain("llama").lm_head.weight)


def written(mesh: DeviceMesh, folder: Path) -> None:
    weights = rs.named_weights(rs.parallelize(plain("llama"), mesh))
    weights.write(folder if mesh.get_rank() == 0 else None)
