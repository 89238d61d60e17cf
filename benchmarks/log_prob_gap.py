"""How far apart two programs are that compute the same log-probabilities: rings and blocks against one process.

    python -m benchmarks.log_prob_gap --lengths 512,2048,8192 --rings 1,2,4

The model is a small Llama with random weights: the figures tell how the gap depends on dtype, ring and length, not how
large it is for a trained model. ``leaves_tokens`` is the length from which the weight of a whole completion in TRL's
``sequence_*`` modes leaves [0.5, 2], with the mean and one standard deviation of the noise; ``weight`` is the product
of the ratios of all tokens here.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

from ringspan.measure.bench.one_process import StepCase, small_llama
from ringspan.measure.machine import describe_machine
from ringspan.torch.model.tasks.causal_lm import token_logprobs
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh
from ringspan.torch.shard_batch import shard_batch


@dataclass(frozen=True, kw_only=True)
class GapCase:
    """A ring, a length and a dtype; the loss in blocks of ``loss_chunk_tokens``."""

    ranks: int = 2
    length: int = 2048
    dtype: str = "bfloat16"
    loss_chunk_tokens: int = 1024


def run(case: GapCase) -> dict[str, Any]:
    return {**asdict(case), **launch(_measure, case.ranks, case, threads=1)[0]}


@torch.no_grad()
def _measure(case: GapCase) -> dict[str, float | None]:
    shape = StepCase(ranks=case.ranks, length=case.length, dtype=case.dtype)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, shape.vocabulary, (1, case.length), generator=draw)
    ids = ids.to(local_device())
    expected = torch.zeros(case.length)
    if dist.get_rank() == 0:
        logits = small_llama(shape).eval()(input_ids=ids).logits[0, :-1].float()
        expected = -cross_entropy(logits, ids[0, 1:], reduction="none").cpu()
    mesh = init_mesh(ring=case.ranks)
    model = parallelize(
        small_llama(shape), mesh, loss_chunk_tokens=case.loss_chunk_tokens
    ).eval()
    found = token_logprobs(model, shard_batch({"input_ids": ids, "labels": ids}, mesh))
    return (
        gap(found[0, : case.length - 1].float().cpu(), expected)
        if dist.get_rank() == 0
        else {}
    )


def gap(found: Tensor, expected: Tensor) -> dict[str, float | None]:
    """Return a token's mean difference and deviation, the product of all ratios, and when one would leave [0.5, 2]."""
    apart = (found - expected).double()
    mean, deviation = float(apart.mean()), float(apart.std())
    return {
        "mean": mean,
        "deviation": deviation,
        "largest": float(apart.abs().max()),
        "weight": math.exp(float(apart.sum())),
        "leaves_tokens": leaves(mean, deviation),
    }


def leaves(mean: float, deviation: float) -> float | None:
    """Solve |mean| T + deviation sqrt(T) = ln 2 for T; None if both are 0."""
    slope, limit = abs(mean), math.log(2)
    if slope == 0:
        return (limit / deviation) ** 2 if deviation else None
    root = (-deviation + math.sqrt(deviation**2 + 4 * slope * limit)) / (2 * slope)
    return root**2


def main(
    lengths: Annotated[
        str, typer.Option(help="Tokens, separated by commas.")
    ] = "512,2048,8192",
    rings: Annotated[str, typer.Option(help="Ranks, separated by commas.")] = "1,2,4",
    chunks: Annotated[str, typer.Option(help="Blocks of the loss.")] = "128,1024",
) -> None:
    """Measure, and print the result as one JSON object."""
    cases = [
        GapCase(
            ranks=int(ranks),
            length=int(length),
            dtype=dtype,
            loss_chunk_tokens=int(chunk),
        )
        for dtype in ("float32", "bfloat16")
        for ranks in rings.split(",")
        for chunk in chunks.split(",")
        for length in lengths.split(",")
    ]
    command = f"python -m benchmarks.log_prob_gap --lengths {lengths} --rings {rings} --chunks {chunks}"
    rows = [run(case) for case in cases]
    print(json.dumps({"command": command, "machine": describe_machine(), "rows": rows}))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import log_prob_gap

    typer.run(log_prob_gap.main)
