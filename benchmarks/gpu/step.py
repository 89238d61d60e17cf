"""One rank's training step of a large model on one device, and the peak that the dry run expects of it."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import ringspan as rs
from benchmarks.gpu.documents import batch_of
from ringspan.core.names import CheckpointName, OffloadName
from ringspan.measure.bench.ring import timed
from ringspan.measure.trace.dry_run import fake_mesh, hugging_face_config, trace
from ringspan.plan.cost.cost import model_flops
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.configs import from_config, model_shape
from ringspan.plan.model.shapes import ModelShape
from ringspan.torch.parallelize import put_on_mesh

Row = Callable[[bool], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank of a ring computes: ``tokens`` of its own, of ``ring`` times as many."""

    ring: int
    tokens: int
    model: str = "llama-3.1-8b"
    lora: bool = False
    """Adapters over weights in nf4."""
    documents: int = 0
    """Their mean length, 0 for one sequence; new ones in each step."""
    folds: int = 1
    checkpoint: CheckpointName = "attention"
    offload: OffloadName = "none"
    compile: bool = False
    repeats: int = 2

    @property
    def can_be_traced(self) -> bool:
        return not (self.compile or self.lora or self.documents)

    @property
    def setting(self) -> Setting:
        """In bfloat16, parameters and optimizer too."""
        return Setting(
            length=self.ring * self.tokens,
            ring=self.ring,
            checkpoint=self.checkpoint,
            offload=self.offload,
            compile=self.compile,
            folds=self.folds,
            parameter_dtype="bfloat16",
            compute_dtype=None if self.lora else "bfloat16",  # pyright: ignore  # packed weights are not cast
        )


def _sized(step: Step, quick: bool) -> tuple[Step, ModelShape]:
    """A step and its model, or both small for a dry run of the script."""
    if not quick:
        return step, model_shape(step.model)
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "vocab_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    config = json.loads(model_shape(step.model).config) | small
    if "layer_types" in config:
        config["layer_types"] = ["full_attention", config["layer_types"][0]]
    return replace(
        step, tokens=64, documents=min(step.documents, 50), compile=False
    ), from_config(config, "tiny")


def measured(step: Step) -> Row:
    """Nobody answers, so that blocks and gathered weights hold anything, at full size: no transfer is waited for."""
    return lambda quick: _measure(*_sized(step, quick))


def traced(step: Step) -> Row:
    """The same step's peak by the dry run, which needs no device."""

    def measure(quick: bool) -> dict[str, Any]:
        one, shape = _sized(step, quick)
        peak = trace(hugging_face_config(shape, one.setting.length), one.setting).peak
        return {
            "step": asdict(one),
            "peak_bytes": peak.total_bytes,
            "bytes": peak.bytes,
            "phase": peak.phase,
        }

    return measure


def _measure(step: Step, shape: ModelShape) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    setting = step.setting
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    with fake_mesh(setting, 0, device.type) as mesh:
        config = hugging_face_config(shape, setting.length)
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            ).train()
        if step.lora:
            model = _adapted(model)
        parameters = sum(p.numel() for p in model.parameters())
        model = put_on_mesh(model, mesh, setting)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-6
        )

        def one(tokens: int, draw: int = 0) -> None:
            batch = batch_of(
                config.vocab_size, step.ring * tokens, step.documents, draw
            )
            split: Any = {"layout": setting.layout, "folds": step.folds}
            model(**rs.shard_batch(batch, mesh, **split, device=device)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        # tunes, and makes the optimizer's state
        one(step.tokens if step.compile else min(2048, step.tokens))
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = [
            timed(lambda draw=draw: one(step.tokens, draw), device)
            for draw in range(1, step.repeats + 1)
        ]
    flops = model_flops(shape, setting.length) / step.ring
    found = {
        "step": asdict(step),
        "parameters": parameters,
        "step_seconds": seconds,
        "flops_per_step": flops,
    }
    found |= {
        "tokens_per_second_per_rank": step.tokens / min(seconds),
        "flops_per_second": flops / min(seconds),
    }
    if is_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return found


def _adapted(model: Any) -> Any:
    """Adapters on all matrices but the head, whose weights are packed in nf4."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    for name, module in list(model.model.named_modules()):
        if type(module) is torch.nn.Linear:
            packed = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            packed.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4"
            )
            model.model.set_submodule(name, packed.to(module.weight.device))
    return get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    )
