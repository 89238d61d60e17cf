"""Reading a prompt and writing after it on a ring of N ranks of one thread, against transformers on one process of N
threads.

    python -m benchmarks.generation --ranks 2 --length 32768
"""

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from transformers import DynamicCache

from ringspan.cli.checks import check_dtype
from ringspan.cli.commands.bench import Dtype, Ranks, Repeats
from ringspan.measure.bench.one_process import StepCase, small_llama
from ringspan.measure.machine import allocated_bytes, describe_machine, timed
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh


@dataclass(frozen=True, kw_only=True)
class GenerateCase:
    """A small Llama, a prompt and how many tokens follow it."""

    ranks: int = 2
    length: int = 32768
    new_tokens: int = 32
    dtype: str = "float32"
    repeats: int = 3


def run(case: GenerateCase) -> dict[str, Any]:
    """Seconds to read the prompt and for a token after it; medians of interleaved repeats, ratios pair by pair.

    ``peak_bytes`` is what a rank allocates at most while it reads, weights left out and its share of the cache
    included.
    """
    results = launch(_measure, case.ranks, case, threads=1)
    return {**results[0], "config": asdict(case), "machine": describe_machine()}


class _Reader:
    """One model that reads the prompt, writes one token, and then the others."""

    def __init__(self, model: Any, ids: Tensor, new_tokens: int) -> None:
        self._model, self._ids, self._new_tokens = model.eval(), ids, new_tokens
        self.text = ids
        self.cache: Any = None

    def read(self) -> None:
        self.cache = (
            self._model.new_cache()
            if hasattr(self._model, "new_cache")
            else DynamicCache()
        )
        self.text = self._write(self._ids, 1)

    def write(self) -> None:
        self.text = self._write(self.text, self._new_tokens)

    def _write(self, ids: Tensor, count: int) -> Tensor:
        return self._model.generate(
            ids,
            past_key_values=self.cache,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )


def _llama(case: StepCase) -> Any:
    """The model of ``bench step`` that ends no text by itself."""
    model = small_llama(case)
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _measure(case: GenerateCase) -> dict[str, Any]:
    rank, device = dist.get_rank(), local_device()
    shape = StepCase(
        ranks=case.ranks, length=case.length + 2 * case.new_tokens, dtype=case.dtype
    )
    ids = torch.randint(
        1,
        shape.vocabulary,
        (1, case.length),
        generator=torch.Generator().manual_seed(0),
    ).to(device)

    on_ring = _Reader(
        parallelize(_llama(shape), init_mesh(ring=case.ranks)), ids, case.new_tokens
    )
    on_one = _Reader(_llama(shape), ids, case.new_tokens) if rank == 0 else None
    seconds: dict[str, list[float]] = {
        name: [] for name in ("ring read", "ring write", "one read", "one write")
    }
    for repeat in range(case.repeats + 1):
        for who, which, threads in (("ring", on_ring, 1), ("one", on_one, case.ranks)):
            for what in ("read", "write"):
                took = timed(
                    None if which is None else getattr(which, what), threads=threads
                )
                if repeat:  # the first round warms up
                    seconds[f"{who} {what}"].append(took)
    same = on_one is not None and torch.equal(on_one.text, on_ring.text)
    of_cache = on_ring.cache.nbytes
    whole = (
        0
        if on_one is None
        else sum(
            layer.keys.nbytes + layer.values.nbytes for layer in on_one.cache.layers
        )
    )
    on_ring.cache, on_one = None, None
    peak = allocated_bytes(on_ring.read)
    return {
        "ratio_prefill": median(
            a / b
            for a, b in zip(seconds["ring read"], seconds["one read"], strict=True)
        ),
        "ratio_token": median(
            a / b
            for a, b in zip(seconds["ring write"], seconds["one write"], strict=True)
        ),
        "prefill_seconds": median(seconds["ring read"]),
        "baseline_prefill_seconds": median(seconds["one read"]),
        "seconds_per_token": median(seconds["ring write"]) / case.new_tokens,
        "baseline_seconds_per_token": median(seconds["one write"]) / case.new_tokens,
        "cache_bytes_per_rank": of_cache,
        "baseline_cache_bytes": whole,
        "peak_bytes": peak,
        "same_tokens": same,
    }


def main(
    ranks: Ranks = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32768,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to write after it.")
    ] = 32,
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
) -> None:
    """Measure, and print the result as one JSON object."""
    check_dtype(dtype)
    case = GenerateCase(
        ranks=ranks, length=length, new_tokens=new_tokens, dtype=dtype, repeats=repeats
    )
    print(json.dumps(run(case)))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import generation

    typer.run(generation.main)
