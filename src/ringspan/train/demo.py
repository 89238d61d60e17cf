"""The main job in miniature: train a Llama over a ring, verify it against one process, measure memory."""

import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ringspan.core.names import LayoutName
from ringspan.measure.bench.one_process import StepCase, small_llama
from ringspan.measure.trace.tracker import held_activations
from ringspan.torch.model.layers.decoder import decoder_of, layers_of
from ringspan.torch.model.layers.modules import whole
from ringspan.torch.model.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.view import view_of
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh
from ringspan.torch.shard_batch import shard_batch
from ringspan.train.config.load import load_config
from ringspan.train.config.tables import TrainConfig

Say = Callable[[str], None]

# Folders of the standard library that are tests, generated tables or other people's packages.
_LEFT_OUT = frozenset(
    (
        "test",
        "tests",
        "encodings",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "site-packages",
        "dist-packages",
    )
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    run: str
    ranks: int
    steps: int
    length: int
    layout: LayoutName


def python_text() -> list[str]:
    """Return the running Python's source and documentation: real, long text on every machine."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        path
        for path in library.iterdir()
        if path.name not in _LEFT_OUT and not path.name.startswith(("_", "."))
    )
    return [
        str(path)
        for path in names
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    ]


def training_config(options: DemoOptions) -> TrainConfig:
    settings = {
        "run": options.run,
        "steps": options.steps,
        "model.dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "model.config.max_position_embeddings": options.length,
        "data.paths": python_text(),
        "data.sequence_length_tokens": options.length,
        "attention.layout": options.layout,
        "optimizer.warmup_steps": min(4, options.steps),
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(Path(__file__).with_name("demo.toml"), overrides)


def prove(
    folder: str, options: DemoOptions, say: Say = lambda line: None
) -> dict[str, Any]:
    """Compare a batch's loss and gradients with transformers' attention on rank 0, and both with float64."""
    say(
        f"loss and gradients of {options.length:,} tokens on the ring of {dist.get_world_size()}"
    )
    tokens = _text_tokens(folder, options.length).to(local_device())
    batch = {"input_ids": tokens, "labels": tokens}
    mesh = init_mesh()
    model = parallelize(_load(folder), mesh, layout=options.layout)
    loss = model(**shard_batch(batch, mesh, layout=options.layout)).loss
    loss.backward()
    gradients = {
        name: whole(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    # The other ranks are done, so rank 0 may use the whole machine to compute as one process.
    if dist.get_rank() != 0:
        return {}
    torch.set_num_threads(os.cpu_count() or 1)
    say("the same on one process, with transformers' own attention")
    # Its own copy, since ``parallelize`` has changed the first one.
    expected, alone = _differentiated(_load(folder), batch, say)
    say("the same in float64, to see which of the two is nearer (the slowest part)")
    _, truth = _differentiated(_load(folder).double(), batch, say)
    rows = [
        {
            "name": name,
            "norm": float(g.norm()),
            "relative_difference": _relative(gradients[name], g),
        }
        for name, g in alone.items()
    ]
    return {
        "loss_one_process": float(expected.detach()),
        "loss_ring": float(loss.detach()),
        "loss_relative_difference": abs(
            float((loss - expected).detach() / expected.detach())
        ),
        "ranks": mesh.get_group("ring").size(),
        "length": tokens.shape[1],
        "gradients": rows,
        "worst_error": {
            "ring": max(_relative(gradients[name], g) for name, g in truth.items()),
            "one_process": max(_relative(alone[name], g) for name, g in truth.items()),
        },
    }


def _differentiated(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], say: Say
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # One process may not be able to hold all activations of a text this long.
    checkpoint_layers(view_of(model), "full")
    with told(model, say):
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
    return loss, {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@contextmanager
def told(
    model: PreTrainedModel, say: Say, every_seconds: float = 5.0
) -> Iterator[None]:
    """Report a checkpointed model's progress every few seconds: layers forward, and again backward."""
    layers, started, num_run, said = (
        layers_of(decoder_of(model)),
        time.perf_counter(),
        0,
        0.0,
    )

    def tell(*_: object) -> None:
        nonlocal num_run, said
        num_run, passed, n = num_run + 1, time.perf_counter() - started, len(layers)
        if passed - said >= every_seconds:
            said = passed
            way = (
                f"backward, layer {min(num_run - n + 1, n)}"
                if num_run >= n
                else f"forward, layer {num_run + 1}"
            )
            say(f"  {way} of {n}, {passed:.0f} s")

    # A checkpointed layer recomputes its parts, without its own hooks, so the hook is on a part.
    handles = [
        next(iter(layer.children())).register_forward_hook(tell)
        for layer in layers.values()
    ]
    yield
    for handle in handles:
        handle.remove()


def _text_tokens(folder: str, length: int) -> torch.Tensor:
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text(
        encoding="utf-8"
    )
    return AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")[
        "input_ids"
    ][:, :length]


def _load(folder: str) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(local_device()).train()


def _relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (x.double() - expected.double()).norm()
        / expected.double().norm().clamp_min(1e-30)
    )


def measure_memory(
    options: DemoOptions, say: Say = lambda line: None
) -> list[dict[str, Any]]:
    """Measure a rank's activations for the same sequence on rings of 1, 2 and 4."""
    rows: list[dict[str, Any]] = []
    for ring in (1, 2, 4):
        if not torch.cuda.is_available() or ring <= torch.cuda.device_count():
            say(f"two passes on a ring of {ring} at {options.length:,} tokens")
            rows += launch(_held, ring, options)[:1]
    return rows


def _held(options: DemoOptions) -> dict[str, Any]:
    mesh, case = init_mesh(), StepCase(length=options.length)
    model = parallelize(
        small_llama(case), mesh, layout=options.layout, feedforward_chunk_tokens=0
    )
    tokens = torch.arange(options.length).remainder(case.vocabulary).unsqueeze(0)
    batch = shard_batch(
        {"input_ids": tokens, "labels": tokens},
        mesh,
        layout=options.layout,
        device=local_device(),
    )
    held_activations(model, batch)  # FSDP makes its buffers in the model's first pass
    return {
        "ring": mesh.get_group("ring").size(),
        "tokens_per_rank": batch["input_ids"].shape[1],
        "activation_bytes": held_activations(model, batch),
    }
