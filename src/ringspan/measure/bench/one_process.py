"""Benchmarks of attention and of a training step: N ranks of one thread against one process of N threads.

The baseline is PyTorch's scaled_dot_product_attention, by itself and in transformers' small Llama.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ringspan.core import reference
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import CheckpointName, LayoutName
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.machine import (
    allocated_bytes,
    describe_machine,
    peak_bytes,
    timed,
)
from ringspan.torch.engine.attention.arguments import check_tensors
from ringspan.torch.engine.attention.op import ring_attention
from ringspan.torch.engine.transport.agreement import shared_bytes
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.memory.checkpointing import checkpoint_layers
from ringspan.torch.model.view import view_of
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh
from ringspan.torch.shard_batch import shard_batch

# The kinds of call that are timed, with their FLOPs in units of the forward pass.
KINDS: Final = {
    "forward": 1.0,
    "forward_backward": 3.5,
}


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    ranks: int = 2
    length: int = 8192
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    mask: str = "causal"
    layout: LayoutName = "zigzag"
    route: str = "ring"
    repeats: int = 5


def run_attention(case: AttentionCase) -> dict[str, Any]:
    """Measure a case: medians of interleaved repeats, each from a barrier to the slowest rank.

    The baseline has a thread per rank, on rank 0, while others sleep; tensors are (B, T, H, D) in memory, as
    projections make them. ``exposed_comm_seconds``: what the slowest rank waited.
    """
    results = launch(_measure_attention, case.ranks, case, threads=1)
    return {**results[0], "config": asdict(case), "machine": describe_machine()}


def _measure_attention(case: AttentionCase) -> dict[str, Any]:
    """Measure a case on one rank: time ring and baseline in turn, then the wait for messages, the peak and the error.

    All ranks draw the same inputs and take their positions of the layout; rank 0 also runs the baseline on the whole
    sequence, with the threads of all ranks, while the others wait.
    """
    both = _Both(case)
    seconds = _interleaved(case, both)
    pairs = sum(
        make_schedule(both.layout, both.mask, rank).num_pairs
        for rank in range(case.ranks)
    )
    flops = 4 * pairs * case.batch * case.heads * case.head_dim
    ring_seconds = {kind: median(seconds[f"ring {kind}"]) for kind in KINDS}
    result = {
        f"ratio_{kind}": median(
            a / b
            for a, b in zip(
                seconds[f"ring {kind}"], seconds[f"one {kind}"], strict=True
            )
        )
        for kind in KINDS
    }
    return result | {
        "ring_seconds": ring_seconds,
        "baseline_seconds": {kind: median(seconds[f"one {kind}"]) for kind in KINDS},
        "gflops": {
            kind: flops * passes / ring_seconds[kind] / 1e9
            for kind, passes in KINDS.items()
        },
        "exposed_comm_seconds": _exposed(both.on_ring),
        "peak_bytes_per_token": {
            "ring": (
                _peak_bytes(partial(both.on_ring, True)) + _largest(shared_bytes())
            )
            / both.layout.tokens_per_rank,
            "baseline": _peak_bytes(both.baseline(True), threads=case.ranks)
            / case.length,
        },
        "max_relative_error": _error(case, both.inputs, both.dout, both.on_ring(True)),
    }


class _Both:
    """A case's attention on the ring and on one process, of inputs that every rank draws the same."""

    def __init__(self, case: AttentionCase) -> None:
        """Draw (B, T, H, D) in memory, seen as (B, H, T, D): all, this rank's positions, and those without padding."""
        self.case, self.mask = case, Mask.parse(case.mask)
        self.layout = Layout(case.layout, case.length, case.ranks)
        device, dtype = local_device(), dtype_named(case.dtype)
        generator = torch.Generator().manual_seed(0)
        length = self.layout.padded_length
        *inputs, dout = (
            torch.randn(
                case.batch, length, heads, case.head_dim, generator=generator
            ).to(device, dtype)
            for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        )
        check_tensors(*inputs)
        mine = torch.from_numpy(self.layout.positions(dist.get_rank())).to(device)
        self._local = [x[:, mine].transpose(1, 2).requires_grad_() for x in inputs]
        self._whole = [
            x[:, : case.length].transpose(1, 2).requires_grad_() for x in inputs
        ]
        self._local_dout = dout[:, mine].transpose(1, 2)
        self._whole_dout = dout[:, : case.length].transpose(1, 2)
        self.inputs, self.dout = (
            [x.transpose(1, 2) for x in inputs],
            dout.transpose(1, 2),
        )
        self._dense = None
        if case.mask not in ("causal", "full"):
            dense = self.mask.dense(*2 * [np.arange(case.length)])
            self._dense = torch.from_numpy(dense).to(device)

    def on_ring(self, backward: bool) -> list[Tensor]:
        out = ring_attention(
            *self._local, mask=self.mask, layout=self.layout, route=self.case.route
        )
        if not backward:
            return [out]
        return [out, *torch.autograd.grad(out, self._local, self._local_dout)]

    def baseline(self, backward: bool) -> Callable[[], list[Tensor]] | None:
        """Return the call on one process, which only rank 0 makes."""
        return partial(self._on_one, backward) if dist.get_rank() == 0 else None

    def _on_one(self, backward: bool) -> list[Tensor]:
        case = self.case
        out = scaled_dot_product_attention(
            *self._whole,
            attn_mask=self._dense,
            is_causal=case.mask == "causal",
            enable_gqa=case.heads != case.kv_heads,
        )
        if not backward:
            return [out]
        return [out, *torch.autograd.grad(out, self._whole, self._whole_dout)]


def _interleaved(case: AttentionCase, both: _Both) -> dict[str, list[float]]:
    """Time ring and baseline in turn; return the seconds of each repeat."""
    seconds: dict[str, list[float]] = {}
    for repeat in range(case.repeats + 1):
        for kind, backward in (("forward", False), ("forward_backward", True)):
            with torch.set_grad_enabled(backward):
                ours = timed(partial(both.on_ring, backward), threads=1)
                theirs = timed(both.baseline(backward), threads=case.ranks)
            if repeat:  # the first round warms up
                seconds.setdefault(f"ring {kind}", []).append(ours)
                seconds.setdefault(f"one {kind}", []).append(theirs)
    return seconds


def _exposed(on_ring: Callable[[bool], list[Tensor]]) -> dict[str, float]:
    """Return the slowest rank's wait for messages in one more forward, and in one more forward and backward."""
    waits: dict[str, float] = {}
    for kind, is_backward in (("forward", False), ("forward_backward", True)):
        dist.barrier()
        before = COUNTERS.exposed_seconds
        on_ring(is_backward)
        waits[kind] = _largest(COUNTERS.exposed_seconds - before)
    return waits


def _peak_bytes(function: Callable[[], Any] | None, *, threads: int = 1) -> float:
    """Return the peak bytes of a pass on any rank: without inputs, with kernel and message buffers."""
    torch.set_num_threads(threads)
    found = allocated_bytes(function) if function else 0
    torch.set_num_threads(1)
    return _largest(found)


def _largest(number: float) -> float:
    largest = torch.tensor(float(number), dtype=torch.float64, device=local_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _error(
    case: AttentionCase, inputs: list[Tensor], dout: Tensor, ours: list[Tensor]
) -> float:
    """Return the largest relative error of out and dq against float64, over sampled rows of each rank."""
    layout = Layout(case.layout, case.length, case.ranks)
    positions = layout.positions(dist.get_rank())
    sample = np.random.default_rng(0).permutation(
        np.flatnonzero(positions < case.length)
    )[:32]
    rows = positions[sample]
    q, k, v = (x.double().cpu().numpy() for x in inputs)
    allowed = Mask.parse(case.mask).dense(rows, np.arange(case.length))
    problem = (
        q[:, :, rows],
        k[:, :, : case.length],
        v[:, :, : case.length],
        allowed,
        case.head_dim**-0.5,
    )
    rows_dout = dout.double().cpu().numpy()[:, :, rows]
    expected = (
        reference.attention(*problem)[0],
        reference.backward(rows_dout, *problem).dq,
    )
    errors = [
        np.linalg.norm(x.detach().double().cpu().numpy()[:, :, sample] - y)
        / np.linalg.norm(y)
        for x, y in zip(ours, expected, strict=False)
    ]
    return _largest(float(max(errors)))


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
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype_named(case.dtype), attn_implementation="sdpa"
    )
    return model.to(local_device()).train()


def run_step(case: StepCase) -> dict[str, Any]:
    """Measure tokens per second of forward, loss, backward and AdamW; medians of interleaved repeats, paired ratio."""
    results = launch(_measure_step, case.ranks, case, threads=1)
    return {**results[0], "config": asdict(case), "machine": describe_machine()}


def _measure_step(case: StepCase) -> dict[str, Any]:
    """Measure training steps on one rank: in turn a parallelized model, and on rank 0 the same model in one process.

    The baseline uses the threads of all ranks, and a checkpoint policy that keeps the same as the ring's.
    """
    rank, device = dist.get_rank(), local_device()
    tokens = torch.randint(
        0, case.vocabulary, (1, case.length), generator=torch.Generator().manual_seed(0)
    )
    mesh = init_mesh(ring=case.ranks)
    ring_model = parallelize(
        small_llama(case), mesh, layout=case.layout, checkpoint=case.checkpoint
    )
    ring_batch = shard_batch(
        {"input_ids": tokens, "labels": tokens}, mesh, layout=case.layout, device=device
    )
    on_ring = partial(
        _step,
        ring_model,
        torch.optim.AdamW(ring_model.parameters(), lr=1e-4),
        ring_batch,
    )
    on_one = None
    if rank == 0:
        plain = small_llama(case)
        if case.checkpoint == "attention":
            options = {
                "use_reentrant": False,
                "context_fn": partial(create_selective_checkpoint_contexts, _keep_sdpa),
            }
            plain.activation_checkpointing_enable(
                activation_checkpointing_kwargs=options
            )
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
        "ratio_tokens_per_second": median(
            b / a for a, b in zip(ours, theirs, strict=True)
        ),
        "ring_tokens_per_second": case.length / median(ours),
        "baseline_tokens_per_second": case.length / median(theirs),
        "peak_bytes": peak_bytes(device),
    }


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


_SDPA = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_sdpa(
    ctx: object, operator: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Keep attention's results and recompute the rest, for a baseline like checkpoint="attention"."""
    return (
        CheckpointPolicy.MUST_SAVE
        if operator in _SDPA
        else CheckpointPolicy.PREFER_RECOMPUTE
    )
