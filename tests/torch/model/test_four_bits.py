"""Adapters over frozen weights that bitsandbytes has packed, and its optimizers on shards: against one process."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ringspan as rs
from ringspan.checkpoints.checkpoint import Checkpoints
from ringspan.checkpoints.state import random_state, restore, run_state
from ringspan.core.errors import CheckpointError, UnsupportedError
from ringspan.measure.trace.tracker import MemoryTracker
from ringspan.torch.model.layers.blockwise import feedforward
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.layers.modules import local_part
from ringspan.torch.model.memory.adamw import own_state
from ringspan.torch.model.weights.packed import is_packed, parts_in, plain_parts
from tests.cases import long
from tests.torch.model.test_peft import LIMITS, stir
from tests.torch.models import build, check, step, tokens, whole

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BITS: dict[str, dict[str, Any]] = {
    "nf4, scales packed": NF4 | {"bnb_4bit_use_double_quant": True},
    "nf4 in bfloat16": NF4 | {"bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


def opened(folder: Path, bits: str, **options: Any) -> Any:
    options |= {
        "quantization_config": BitsAndBytesConfig(**BITS[bits]),
        "device_map": "cpu",
    }
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", **options
    )


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    # In training: in evaluation, bitsandbytes computes in bfloat16 on some CPUs.
    return stir(
        get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        )
    ).train()


def trained(found: Any) -> Any:
    """A loss and its gradients, without the parts that only a split model has."""
    return found[0], {
        name: gradient for name, gradient in found[1].items() if gradient is not None
    }


def ring_step(
    mesh: DeviceMesh, folder: Path, bits: str, in_parts: bool, options: dict[str, Any]
) -> Any:
    if in_parts:
        config = BitsAndBytesConfig(**BITS[bits])
        options |= {
            "dtype": torch.float32,
            "quantization_config": config,
            "adapt": adapted,
        }
        model = rs.from_pretrained(folder, mesh, **options)
    else:
        model = adapted(opened(folder, bits))
        model(input_ids=tokens(1, 24))  # it may have run before
        rs.parallelize(model, mesh, **options)
    return trained(step(model, mesh))


@pytest.mark.parametrize(
    ("kind", "bits", "in_parts", "ranks", "replicate", "options"),
    [
        *long(("llama", "nf4, scales packed", False, 3, 1, {"checkpoint": "full"})),
        ("llama", "nf4, scales packed", True, 2, 1, {}),
        *long(
            (
                "qwen2",
                "nf4 in bfloat16",
                True,
                4,
                2,
                {"checkpoint": "none"},
            ),  # with biases
        ),
        ("mistral-window", "fp4", False, 2, 1, {"offload": "activations"}),
        (
            "llama-tied",
            "int8",
            False,
            2,
            1,
            {"feedforward_chunk_tokens": 5, "norm_chunk_tokens": 6},
        ),
        *long(("llama", "int8", True, 3, 1, {})),
    ],
)
def test_adapters_train_as_on_one_process(
    pool, tmp_path, kind, bits, in_parts, ranks, replicate, options
):
    build(kind).save_pretrained(tmp_path)
    expected = trained(step(adapted(opened(tmp_path, bits))))
    assert len(expected[1]) > 20
    check(
        pool.run(
            ring_step, ranks, tmp_path, bits, in_parts, options, replicate=replicate
        ),
        expected,
        LIMITS,
    )


class Gathers(TorchDispatchMode):
    """Notes how many bytes each gather gives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def sizes(
    mesh: DeviceMesh, folder: Path, bits: str
) -> tuple[int, int, list[int], list[int]]:
    """Bytes of packed weights before and on this rank; of each layer's parts in even rows, and as it is gathered."""
    model = adapted(opened(folder, bits))
    packed = [p for _, p in model.named_parameters() if is_packed(p)]
    before = sum(part.nbytes for p in packed for _, part in plain_parts("", p))
    layers = [
        [x for p in each.parameters() for _, x in plain_parts("", p)]
        for each in layers_of(model).values()
    ]
    even = [
        sum(x.nbytes // len(x) * 2 * -(-len(x) // 2) for x in layer) for layer in layers
    ]
    rs.parallelize(model, mesh)
    split: list[Any] = [p for p in model.parameters() if id(p) in parts_in(model)]
    assert all(isinstance(p, DTensor) for p in split)
    assert sum(p.nbytes for p in split) == before
    with Gathers() as gathers, torch.no_grad():
        model(**rs.shard_batch({"input_ids": tokens(1, 24)}, mesh))
    return (
        before,
        sum(local_part(p).nbytes for p in split),
        even,
        [size for size in gathers.bytes if size in even],
    )


@pytest.mark.parametrize("bits", ["nf4, scales packed", "int8"])
def test_what_is_gathered_is_packed(pool, tmp_path, bits):
    build("llama").save_pretrained(tmp_path)
    [(before, here, layers, gathered), (_, there, *_)] = pool.run(
        sizes, 2, tmp_path, bits
    )
    assert gathered == layers
    assert here + there == before
    assert abs(here - there) < before / 20


class Living(MemoryTracker):
    """Counts what has memory: tensors that are not read yet have none."""

    def _add(self, storage: torch.UntypedStorage, category: Any) -> None:
        with suppress(RuntimeError):
            if storage.data_ptr():
                super()._add(storage, category)


def loaded(mesh: DeviceMesh, folder: Path, bits: str) -> float:
    """The peak of loading over the bytes that this rank keeps."""
    with (
        Living() as tracker,
        mock.patch.object(
            feedforward, "mixes_tokens", wraps=feedforward.mixes_tokens
        ) as tried,
    ):
        config = BitsAndBytesConfig(**BITS[bits])
        model = rs.from_pretrained(
            folder, mesh, dtype=torch.bfloat16, quantization_config=config
        )
    assert tried.call_count == 3  # the first layer's attention, feed-forward and norm
    kept = sum(local_part(p).nbytes for p in model.parameters())
    assert tracker.moments[-1].total_bytes >= kept
    return tracker.peak.total_bytes / kept


@pytest.mark.parametrize(
    ("bits", "ranks"), [*long(("nf4, scales packed", 2)), ("int8", 1)]
)
def test_loading_peaks_below_13_tenths_of_the_packed_bytes(pool, tmp_path, bits, ranks):
    sizes = {"num_hidden_layers": 16, "hidden_size": 128, "intermediate_size": 256}
    build("llama", **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    assert max(pool.run(loaded, ranks, tmp_path, bits)) < 1.3


def saved(mesh: DeviceMesh, base: Path, folder: Path) -> Any:
    model = adapted(prepare_model_for_kbit_training(opened(base, "nf4, scales packed")))
    rs.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    step(model, mesh)
    optimizer.step()
    model.save_pretrained(folder)
    weights = {
        name: whole(p.detach())
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    ids = tokens(1, 6)
    return weights, model.eval().generate(
        input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0
    )


def test_peft_opens_the_adapter_and_merges_it_into_plain_weights(pool, tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    (weights, made), _ = pool.run(saved, 2, tmp_path / "base", tmp_path / "adapter")
    base = build("llama").from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    merged: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    found = dict(merged.named_parameters())
    assert weights
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    plain = merged.merge_and_unload()
    assert not [name for name, _ in plain.named_parameters() if "lora" in name]
    again: Any = PeftModel.from_pretrained(
        opened(tmp_path / "base", "nf4, scales packed"), tmp_path / "adapter"
    )
    for module in again.modules():
        # as on a ring: in evaluation it would compute in bfloat16
        module.support_avx512bf16_for_cpu = False
    expected = again.eval().generate(
        input_ids=tokens(1, 6), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert made.tolist() == expected.tolist()


def refused(mesh: DeviceMesh, folder: Path, what: str) -> None:
    if what == "outliers":
        config = BitsAndBytesConfig(load_in_8bit=True)
        rs.parallelize(
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=config),
            mesh,
        )
    elif what == "outliers, from files":
        rs.from_pretrained(
            folder, mesh, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )
    elif what == "whole":
        rs.parallelize(opened(folder, "fp4"), mesh).save_pretrained(folder / "whole")
    elif what == "other":
        rs.from_pretrained(folder, mesh, quantization_config={"load_in_4bit": True})
    else:
        model = rs.parallelize(build("llama"), mesh)
        step(model, mesh)
        bnb.optim.LAMB8bit(model.parameters(), max_unorm=1.0).step()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "outliers",
            "llm_int8_threshold=6.0 apart, which it chooses by all tokens.*use llm_int8_threshold=0.0",
        ),
        ("outliers, from files", "llm_int8_threshold=6.0 apart"),
        ("whole", "has packed weights, .*; save its adapter"),
        (
            "other",
            "quantization_config=dict does not pack weights as they are read; use BitsAndBytesConfig",
        ),
        (
            "norm",
            r"LAMB8bit limits updates by the norm of a whole weight \(max_unorm\).*use AdamW8bit",
        ),
    ],
)
def test_what_packed_weights_cannot_do_raises(pool, tmp_path, what, message):
    build("llama").save_pretrained(tmp_path)
    for outcome in pool.outcomes(refused, 2, tmp_path, what):
        assert isinstance(outcome, UnsupportedError) and re.search(
            message, str(outcome)
        )


def make(kind: str, parameters: Any) -> Any:
    return getattr(bnb.optim, kind)(parameters, lr=1e-2, min_8bit_size=64)


def four_steps(mesh: DeviceMesh, kind: str, folder: Path) -> None:
    """Steps on a ring and on parameters that are its shards; the state is saved after two, and goes on from there."""
    model = rs.parallelize(build("llama"), mesh)
    parameters = list(model.parameters())
    shards = [nn.Parameter(local_part(p.detach()).clone()) for p in parameters]
    optimizer, expected = make(kind, parameters), make(kind, shards)
    checkpoints = Checkpoints(folder, run_id="a", keep=2, asynchronous=False)
    for number in range(4):
        step(model, mesh)
        for p, shard in zip(parameters, shards, strict=True):
            shard.grad = (
                local_part(p.grad).clone()
                if p.grad is not None and shard.numel()
                else None
            )
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        assert all(
            torch.equal(local_part(p.detach()), s)
            for p, s in zip(parameters, shards, strict=True)
        ), number
        assert optimizer.param_groups[0]["params"][0] is parameters[0]
        if number == 1:
            own, state = (
                random_state(torch.device("cpu")) | own_state(optimizer),
                run_state(model, optimizer),
            )
            assert (
                checkpoints.save(2, state, own, {}, mesh={"ring": 2}, layout="zigzag")
                is None
            )
            with torch.no_grad():
                for p in parameters:
                    local_part(p).zero_()
            optimizer = make(kind, parameters)
            found = checkpoints.find()
            assert found.folder is not None
            assert found.manifest is not None
            others = found.manifest.model_copy(update={"num_ranks": 3})
            with pytest.raises(
                CheckpointError,
                match=r"8bit has packed its state by the shards of 3 ranks; resume on",
            ):
                restore(
                    checkpoints,
                    found.folder,
                    others,
                    model,
                    optimizer,
                    torch.device("cpu"),
                )
            restore(
                checkpoints,
                found.folder,
                found.manifest,
                model,
                optimizer,
                torch.device("cpu"),
            )
    checkpoints.close()


@pytest.mark.parametrize("kind", ["AdamW8bit", *long("PagedAdamW8bit", "Lion8bit")])
def test_an_optimizer_steps_shards_as_it_does_parameters(pool, tmp_path, kind):
    pool.run(four_steps, 4, kind, tmp_path, replicate=2)
