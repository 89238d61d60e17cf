"""CPU milliseconds of a layer and step, of a ring and of plain transformers with FSDP2, beside computing.

    OMP_NUM_THREADS=1 python -m benchmarks.host_cost [--ranks 1] [--steps 40] [--kinds llama,qwen3-moe] [--layers 36]

The models have twelve layers, or as many as ``--layers`` says (36 of an 8B), that are so small that computing takes
next to nothing; each rank has as many tokens in both. Steps of a ring and of plain transformers take turns in one
process, so that a machine whose speed drifts changes both alike: ``ratio`` is the median of the ratios of neighbouring
steps, in CPU time of rank 0's process, and milliseconds are medians too. ``calls`` are Python's function calls per
layer and step. ``new_documents``: the documents of each step have other lengths. ``compiled``: layers of the ring are
(``parallelize(compile=True)``), and the plain ones are not. ``expert_slices``: of the ring's experts.
"""

import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import typer
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import ringspan as rs
from ringspan.measure.machine import describe_machine
from ringspan.torch.runtime.launch import launch

RESULT: Final = Path(__file__).parent / "results" / "host-cost.json"
LAYERS: Final = 12
TOKENS: Final = 64
WARM_UP: Final = 4
PARTS: Final = ("batch", "forward", "backward", "clipping", "optimizer")
VOCABULARY: Final = 256
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 65536,
}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    "qwen3-next": (
        "qwen3_next",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class HostCase:
    """A model, a checkpoint policy, and who trains it; plain transformers have one checkpoint, ``full``."""

    kind: str = "llama"
    checkpoint: str = "attention"
    ranks: int = 1
    is_plain: bool = False
    lora: bool = False
    new_documents: bool = False
    compiled: bool = False
    expert_slices: int = 1
    layers: int = LAYERS


def cases(kinds: list[str], ranks: int, layers: int) -> list[tuple[HostCase, HostCase]]:
    """Return pairs of a ring's case and the plain one that it is compared with."""
    wanted = [
        HostCase(kind=kind, checkpoint=checkpoint, ranks=ranks, layers=layers)
        for kind in kinds
        for checkpoint in (
            ("none", "attention", "full") if kind == "llama" else ("attention",)
        )
    ]
    if "llama" in kinds:
        wanted.append(HostCase(ranks=ranks, layers=layers, lora=True))
        wanted.append(HostCase(ranks=ranks, layers=layers, new_documents=True))
        for checkpoint in ("none", "attention"):
            case = HostCase(checkpoint=checkpoint, ranks=ranks, layers=layers)
            wanted.append(replace(case, compiled=True))
    if "qwen3-moe" in kinds:
        case = HostCase(kind="qwen3-moe", ranks=ranks, layers=layers)
        wanted.append(replace(case, expert_slices=2))
    return [(case, plain_of(case)) for case in wanted]


def plain_of(case: HostCase) -> HostCase:
    """Return the case of plain transformers: without documents, which it does not keep apart."""
    checkpoint = "none" if case.checkpoint == "none" else "full"
    others = {"new_documents": False, "compiled": False, "expert_slices": 1}
    return replace(case, checkpoint=checkpoint, is_plain=True, **others)


Step = Callable[[int], tuple[float, ...]]


def measure(ring: HostCase, plain: HostCase, steps: int) -> dict[str, Any]:
    """Train both on this rank, a step of each in turn; return milliseconds and calls per layer, and the ratio."""
    torch.set_num_threads(1)
    both: dict[str, Step] = {}
    for name, case, make in (("ring", ring, _on_ring), ("plain", plain, _plain)):
        torch.manual_seed(0)
        both[name] = make(case)
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in both}
    for number in range(WARM_UP + steps):
        for name, step in both.items():
            dist.barrier()
            parts = step(number)
            if number >= WARM_UP:
                times[name].append(parts)
    found: dict[str, Any] = {
        name: _per_layer(parts, ring.layers)
        | {"calls": _calls(both[name], WARM_UP + steps, ring.layers)}
        for name, parts in times.items()
    }
    pairs = zip(times["ring"], times["plain"], strict=True)
    ratios = [sum(mine) / sum(theirs) for mine, theirs in pairs]
    quarters = statistics.quantiles(ratios, n=4)
    return found | {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(quarters[0], 3), round(quarters[2], 3)],
    }


def _per_layer(parts: list[tuple[float, ...]], layers: int) -> dict[str, float]:
    """Return the medians of a step and of its parts, in milliseconds of a layer."""
    columns = dict(zip(PARTS, zip(*parts, strict=True), strict=True))
    columns["step"] = tuple(map(sum, parts))
    return {
        name: round(1e3 / layers * statistics.median(column), 4)
        for name, column in columns.items()
    }


def _calls(step: Step, number: int, layers: int) -> int:
    """Return Python's function calls of a step, per layer."""
    profile = cProfile.Profile()
    profile.enable()
    step(number)
    profile.disable()
    rows = pstats.Stats(profile).stats.values()  # pyright: ignore
    return round(sum(row[1] for row in rows) / layers)


def _model(case: HostCase) -> Any:
    kind, changes = KINDS[case.kind]
    sizes = SIZES | {"num_hidden_layers": case.layers}
    config = AutoConfig.for_model(kind, **sizes, **changes)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config).train()
    if case.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model


def _step(model: Any, batch_of: Callable[[int], dict[str, Any]]) -> Step:
    """Return a step that returns the CPU seconds of its parts."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)

    def step(number: int) -> tuple[float, ...]:
        marks = [time.process_time()]
        batch = batch_of(number)
        marks.append(time.process_time())
        loss = model(**batch).loss
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        marks.append(time.process_time())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.process_time())
        return tuple(end - start for start, end in pairwise(marks))

    return step


def _plain(case: HostCase) -> Step:
    model, rank = _model(case), dist.get_rank()
    mesh = init_device_mesh("cpu", (case.ranks,))
    if case.checkpoint != "none":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        if case.lora:
            model.enable_input_require_grads()
    base = model.get_base_model() if case.lora else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS * case.ranks))
    mine = ids[:, rank * TOKENS : (rank + 1) * TOKENS]
    return _step(model, lambda _: {"input_ids": mine, "labels": mine})


def _on_ring(case: HostCase) -> Step:
    mesh = rs.init_mesh(ring=case.ranks)
    model = rs.parallelize(
        _model(case),
        mesh,
        checkpoint=case.checkpoint,
        watchdog=False,
        compile=case.compiled,
        expert_slices=case.expert_slices,
    )
    length = TOKENS * case.ranks
    ids = torch.randint(0, VOCABULARY, (1, length))

    def batch_of(number: int) -> dict[str, Any]:
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        if case.new_documents:
            draw = torch.Generator().manual_seed(number)
            cuts = torch.randint(1, length, (6,), generator=draw).unique().tolist()
            ends = [*cuts, length]
            starts = [0, *cuts]
            lengths = [end - start for start, end in zip(starts, ends, strict=True)]
            positions = [torch.arange(each) for each in lengths]
            batch["position_ids"] = torch.cat(positions)[None]
        return rs.shard_batch(batch, mesh)

    return _step(model, batch_of)


def main(
    kinds: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(
        KINDS
    ),
    ranks: int = 1,
    steps: Annotated[int, typer.Option(help="Steps of each that are timed.")] = 40,
    layers: int = LAYERS,
) -> None:
    """Measure all cases, and put the rows into the result file."""
    rows: list[dict[str, Any]] = []
    for ring, plain in cases(kinds.split(","), ranks, layers):
        found = launch(measure, ranks, ring, plain, steps, threads=1)[0]
        print(
            f"{ring}: {found['ring']['step']:.2f} ms a layer, {found['ratio']:.2f} of plain"
        )
        rows.append(asdict(ring) | found)
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    same = [_place(row) for row in rows]
    kept = [row for row in before["rows"] if _place(row) not in same]
    command = "OMP_NUM_THREADS=1 python -m benchmarks.host_cost"
    result = {
        "command": command,
        "machine": describe_machine(),
        "tokens_per_rank": TOKENS,
        "rows": kept + rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kind"], row["ranks"], row["layers"]


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import host_cost

    typer.run(host_cost.main)
