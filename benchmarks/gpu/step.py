"""One rank's training step of a Llama 3.1 8B on one device, and the peak that the dry run expects of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig

import ringspan as rs
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
    checkpoint: CheckpointName = "attention"
    offload: OffloadName = "none"
    compile: bool = False
    repeats: int = 2

    @property
    def setting(self) -> Setting:
        """In bfloat16, parameters and optimizer too."""
        return Setting(
            length=self.ring * self.tokens,
            ring=self.ring,
            checkpoint=self.checkpoint,
            offload=self.offload,
            compile=self.compile,
            parameter_dtype="bfloat16",
        )


def _sized(step: Step, quick: bool) -> tuple[Step, ModelShape]:
    """A step and its model, or both small for a dry run of the script."""
    if not quick:
        return step, model_shape("llama-3.1-8b")
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=128,
    )  # fmt: skip
    return replace(step, tokens=16, compile=False), from_config(config.to_dict(), "tiny")


def measured(step: Step) -> Row:
    """Nobody answers, so that blocks and gathered weights hold anything, at full size: no transfer is waited for."""
    return lambda quick: _measure(*_sized(step, quick))


def traced(step: Step) -> Row:
    """The same step's peak by the dry run, which needs no device."""

    def measure(quick: bool) -> dict[str, Any]:
        one, shape = _sized(step, quick)
        peak = trace(hugging_face_config(shape, one.setting.length), one.setting).peak
        return {"step": asdict(one), "peak_bytes": peak.total_bytes, "bytes": peak.bytes, "phase": peak.phase}

    return measure


def _measure(step: Step, shape: ModelShape) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    setting = step.setting
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    with fake_mesh(setting, 0, device.type) as mesh:
        with device:
            config = hugging_face_config(shape, setting.length)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        parameters = sum(p.numel() for p in model.parameters())
        model = put_on_mesh(model, mesh, setting)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

        def one(tokens: int) -> None:
            ids = torch.zeros(1, step.ring * tokens, dtype=torch.int64)
            batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh, layout=setting.layout, device=device)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        one(step.tokens if step.compile else min(2048, step.tokens))  # tunes, and makes the optimizer's state
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = [timed(lambda: one(step.tokens), device) for _ in range(step.repeats)]
    flops = model_flops(shape, setting.length) / step.ring
    found = {"step": asdict(step), "parameters": parameters, "step_seconds": seconds, "flops_per_step": flops}
    found |= {"tokens_per_second_per_rank": step.tokens / min(seconds), "flops_per_second": flops / min(seconds)}
    if is_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found
