"""Benchmark: a training step on N one-thread ranks against one process of N threads with transformers' sdpa."""

from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ringspan.core.names import CheckpointName, LayoutName
from ringspan.measure.machine import describe_machine, peak_bytes, timed
from ringspan.torch.data.batch import shard_batch
from ringspan.torch.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.view import view_of
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh


@dataclass(frozen=True, kw_only=True)
class StepCase:
    ranks: int = 2
    length: int = 8192
    layers: int = 4
    hidden_size: int = 256
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 4096
    dtype: str = "float32"
    layout: LayoutName = "zigzag"
    checkpoint: CheckpointName = "attention"
    repeats: int = 3


def small_llama(case: StepCase) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden_size,
        intermediate_size=3 * case.hidden_size,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=case.length,
        attention_dropout=0.0,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype), attn_implementation="sdpa")
    return model.to(local_device()).train()


def run(case: StepCase) -> dict[str, Any]:
    """Measure tokens per second of forward, loss, backward and AdamW; medians of interleaved repeats, paired ratio."""
    results = launch(_measure, case.ranks, case, threads=1)
    return {**results[0], "config": asdict(case), "machine": describe_machine()}


def _measure(case: StepCase) -> dict[str, Any]:
    rank, device = dist.get_rank(), local_device()
    tokens = torch.randint(0, case.vocabulary, (1, case.length), generator=torch.Generator().manual_seed(0))
    mesh = init_mesh(ring=case.ranks)
    ring_model = parallelize(small_llama(case), mesh, layout=case.layout, checkpoint=case.checkpoint)
    ring_batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh, layout=case.layout, device=device)
    on_ring = partial(_step, ring_model, torch.optim.AdamW(ring_model.parameters(), lr=1e-4), ring_batch)
    on_one = None
    if rank == 0:
        plain = small_llama(case)
        if case.checkpoint == "attention":
            options = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_sdpa)}
            plain.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            checkpoint_layers(view_of(plain), case.checkpoint)
        whole = tokens.to(device)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        on_one = partial(_step, plain, optimizer, {"input_ids": whole, "labels": whole})
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(case.repeats + 1):
        pair = timed(on_ring, threads=1), timed(on_one, threads=case.ranks)
        if repeat:  # the first round warms up
            ours.append(pair[0])
            theirs.append(pair[1])
    return {
        "ratio_tokens_per_second": median(b / a for a, b in zip(ours, theirs, strict=True)),
        "ring_tokens_per_second": case.length / median(ours),
        "baseline_tokens_per_second": case.length / median(theirs),
        "peak_bytes": peak_bytes(device),
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


_SDPA = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_sdpa(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Checkpoint like checkpoint="attention", for the baseline."""
    return CheckpointPolicy.MUST_SAVE if operator in _SDPA else CheckpointPolicy.PREFER_RECOMPUTE
