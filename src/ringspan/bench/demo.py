"""The main job in miniature: train a Llama on real text over a ring, prove it equal to one process, and measure
memory.
"""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ringspan.bench import memory
from ringspan.core.layout import LayoutName
from ringspan.torch.batch import shard_batch
from ringspan.torch.launch import local_device
from ringspan.torch.mesh import init_mesh
from ringspan.torch.models import parallelize
from ringspan.train.config import TrainConfig, parse_config

# Folders of the standard library that are tests, generated tables or other people's packages.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "ensurepip",
    "turtledemo",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """How large the demonstration is; the defaults take a few minutes on two cores."""

    run: str = "runs/demo"
    ranks: int = 2
    steps: int = 24
    length: int = 8192
    layout: LayoutName = "zigzag"


def python_text() -> list[str]:
    """Source and documentation of the running Python: real, long text that every machine has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        path for path in library.iterdir() if path.name not in _LEFT_OUT and not path.name.startswith(("_", "."))
    )
    return [str(path) for path in names if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))]


def training_config(options: DemoOptions) -> TrainConfig:
    """A Llama of about 5M parameters from scratch, with a tokenizer trained on the spot."""
    return parse_config(
        {
            "run": options.run,
            "steps": options.steps,
            "model": {
                "init": "scratch",
                "tokenizer": "train",
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "config": {
                    "model_type": "llama",
                    "vocab_size": 4096,
                    "hidden_size": 256,
                    "intermediate_size": 704,
                    "num_hidden_layers": 5,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": options.length,
                    "tie_word_embeddings": True,
                },
            },
            "data": {
                "paths": python_text(),
                "extensions": [".py", ".rst", ".txt"],
                "sequence_length_tokens": options.length,
                "eval_fraction": 0.02,
            },
            "attention": {"layout": options.layout},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": min(4, options.steps)},
            "evaluation": {"num_sequences": 2},
        }
    )


def prove(folder: str, length: int, layout: LayoutName) -> dict[str, Any]:
    """The loss and every gradient of one batch, on this ring and on rank 0 alone with transformers' own attention.

    Every rank calls it. Relative differences are ``||ring - one|| / ||one||``.
    """
    device = local_device()
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    tokens = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": tokens, "labels": tokens}
    mesh = init_mesh()
    model = parallelize(_load(folder), mesh, layout=layout)
    loss = model(**shard_batch(batch, mesh, layout=layout)).loss
    loss.backward()
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if dist.get_rank() != 0:
        return {}
    torch.set_num_threads(os.cpu_count() or 1)
    plain = _load(folder)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    expected = plain(**batch).loss
    expected.backward()
    rows = [
        {
            "name": name,
            "norm": float(p.grad.norm()),
            "relative_difference": float((gradients[name] - p.grad).norm() / p.grad.norm().clamp_min(1e-30)),
        }
        for name, p in plain.named_parameters()
        if p.grad is not None
    ]
    return {
        "loss_one_process": float(expected.detach()),
        "loss_ring": float(loss.detach()),
        "loss_relative_difference": abs(float((loss - expected).detach() / expected.detach())),
        "ranks": mesh["ring"].size(),
        "length": length,
        "gradients": rows,
    }


def _load(folder: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(local_device()).train()


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def measure_memory(options: DemoOptions) -> list[dict[str, Any]]:
    """Activations that a rank holds for the same sequence on rings of 1, 2 and 4."""
    rings = tuple(n for n in (1, 2, 4) if not torch.cuda.is_available() or n <= torch.cuda.device_count())
    case = memory.MemoryCase(rings=rings, length=options.length, checkpoints=("attention",), layout=options.layout)
    return [
        {
            "ring": row["ring"],
            "tokens_per_rank": row["tokens_per_rank"],
            "activation_bytes": row["bytes"]["activations"],
        }
        for row in memory.run(case)["rows"]
        if row["length"] == options.length
    ]
