"""One rank's training step of a Llama 3.1 8B on one device, and the peak that the dry run expects of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringspan.core.names import CheckpointName, OffloadName
from ringspan.measure.bench.ring import timed

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
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    vocabulary: int = 128256
    dtype: str = "bfloat16"

    @property
    def length(self) -> int:
        return self.ring * self.tokens

    def shrunk(self) -> "Step":
        """For a dry run of the script."""
        sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 64, "vocabulary": 128}
        return replace(self, tokens=16, compile=False, **sizes)


def measured(step: Step) -> Row:
    """Nobody answers, so that blocks and gathered weights hold anything, at full size: no transfer is waited for."""
    return lambda quick: _measure(step.shrunk() if quick else step)


def traced(step: Step) -> Row:
    """The same step's peak by the dry run, which needs no device."""

    def measure(quick: bool) -> dict[str, Any]:
        from ringspan.measure.trace.dry_run import trace

        one = step.shrunk() if quick else step
        peak = trace(*setup(one)).peak
        return {"step": asdict(one), "peak_bytes": peak.total_bytes, "bytes": peak.bytes, "phase": peak.phase}

    return measure


def setup(step: Step) -> tuple[Any, Any]:
    """The model's config and the planner's setting of a step."""
    from transformers import LlamaConfig

    from ringspan.plan.cost.setting import Setting

    config = LlamaConfig(
        vocab_size=step.vocabulary,
        hidden_size=step.hidden,
        intermediate_size=step.intermediate,
        num_hidden_layers=step.layers,
        num_attention_heads=step.heads,
        num_key_value_heads=step.kv_heads,
        max_position_embeddings=step.length,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attention_dropout=0.0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    setting = Setting(
        length=step.length,
        ring=step.ring,
        checkpoint=step.checkpoint,
        offload=step.offload,
        compute_dtype=step.dtype,
        parameter_dtype=step.dtype,
    )
    return config, setting


def _measure(step: Step) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    import ringspan as rs

    config, setting = setup(step)
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    with _alone_among(step.ring):
        mesh = rs.init_mesh(ring=step.ring)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, step.dtype)).train()
        parameters = sum(p.numel() for p in model.parameters())
        options = {"checkpoint": step.checkpoint, "offload": step.offload, "compile": step.compile}
        model = rs.parallelize(model, mesh, layout=setting.layout, **options)
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
    flops = _flops(step, parameters)
    found = {"step": asdict(step), "parameters": parameters, "step_seconds": seconds, "flops_per_step": flops}
    found |= {"tokens_per_second_per_rank": step.tokens / min(seconds), "flops_per_second": flops / min(seconds)}
    if is_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _flops(step: Step, parameters: int) -> float:
    """Of the model, as they are usually counted: nothing that is computed again, half of the pairs of a causal mask."""
    attention = step.layers * 4 * (step.tokens * step.length / 2) * step.hidden * 3
    return 6 * (parameters - step.vocabulary * step.hidden) * step.tokens + attention


@contextmanager
def _alone_among(ranks: int) -> Iterator[None]:
    """A process group in which nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
