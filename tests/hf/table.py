"""The table of docs/trainers.md: ten steps on a ring beside one process, and what the library's own context parallelism
does with the same script. ``python -m tests.hf.table`` measures it and writes it (three minutes), or the cases named.
It fails where a figure is further from one process than ``BOUND``.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import accelerate
import torch
import transformers
import trl
from accelerate import ParallelismConfig

from ringspan.measure.machine import describe_machine
from ringspan.torch.runtime.forks import serve_forks
from tests.hf.preferences import dpo, kto, orpo, reward
from tests.hf.rollouts import grpo
from tests.hf.trainers import differences, history, plain, sft, train
from tests.pool import Pool

ROOT: Final = Path(__file__).parents[2]
RESULT: Final = ROOT / "benchmarks" / "results" / "trainers-cpu.json"
PAGE: Final = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- table: python -m tests.hf.table -->", "<!-- end of the table -->"
RINGS: Final = {"ring 2": (2, 1), "ring 3": (3, 1), "2 x ring 2": (4, 2)}
COLUMNS: Final = ("loss", "grad_norm", "eval_loss", "weights")
BOUND: Final = 1e-5  # relative
# TRL takes the mean of these over batches, and two rings have half as many, each of other examples.
MEANS: Final = frozenset({("2 x ring 2", "entropy"), ("2 x ring 2", "eval_entropy")})


@dataclass(frozen=True)
class Case:
    """A trainer with its options, and how it is called in the table.

    ``averages``: it takes the mean of what processes give, so that two rings are held to two processes without a ring.
    """

    name: str
    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    averages: bool = False
    model: str = "llama"


CASES: Final = [
    Case("Trainer", plain),
    Case("SFT", sft),
    Case("SFT, packed", sft, {"packing": True}),
    Case("SFT, completions alone, padding-free", sft, {
        "padding_free": True, "max_length": None, "column": "completion_mask", "completion_only_loss": True,
    }),
    Case("DPO", dpo),
    Case("KTO", kto),
    # At the others' 1e-2 these two amplify rounding: 2e-5 apart in float32, and exact in float64.
    Case("ORPO, learning rate 3e-3", orpo, {"learning_rate": 3e-3}, averages=True),
    Case("reward model, learning rate 3e-3", reward, {"learning_rate": 3e-3}),
    Case("reward model, in float64", reward, {"double": True}),
    Case("SFT, QLoRA", sft, model="llama@nf4"),
    Case("DPO, QLoRA", dpo, {"reference": None}, model="llama@nf4"),
    Case("GRPO, completions given", grpo, {"beta": 0.0}),
]  # fmt: skip


def of_the_library(
    mesh: Any, make: Callable[..., Any], model: str, options: dict[str, Any]
) -> Any:
    """The same script with accelerate's context parallelism over two ranks; what it raises, in one line."""
    torch.manual_seed(0)
    own = {
        "parallelism_config": ParallelismConfig(cp_size=2),
        "fsdp": True,
        "fsdp_config": {"version": 2, "reshard_after_forward": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make(mesh, model, None, folder, own | options)
            trainer.train()
            trainer.evaluate()
            return history(trainer) | {"weights": {}}
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"


def apart(
    case: Case, ranks: int, replicas: int, pools: dict[int, Pool]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return a case's largest differences from one process over all ranks, by figure, and the log of that process."""
    # TRL evaluates each process's batch by itself, and takes the mean
    sizes = {"per_device_train_batch_size": 2 * replicas}
    if case.make is not sft:
        sizes["per_device_eval_batch_size"] = 2 * replicas
    if case.averages and replicas > 1:
        expected = pools[replicas].run(
            train, replicas, case.make, case.model, None, case.options
        )[0]
    else:
        expected = train(None, case.make, case.model, None, case.options | sizes)
    every = pools[ranks].run(
        train, ranks, case.make, case.model, {}, case.options, replicate=replicas
    )
    each = [differences(found, expected) for found in every]
    return {key: max(one.get(key, 0.0) for one in each) for key in each[0]}, expected


def measured(case: Case, pools: dict[int, Pool]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name}
    for name, (ranks, replicas) in RINGS.items():
        row[name], expected = apart(case, ranks, replicas, pools)
        if ranks == 2:
            row["one process"] = {
                "loss": expected["loss"],
                "eval_loss": expected["eval_loss"][0],
            }
    try:
        theirs = pools[2].run(of_the_library, 2, case.make, case.model, case.options)[0]
    except Exception as error:  # a rank that died or hung
        theirs = f"{type(error).__name__}: {' '.join(str(error).split())}"
        pools[2].restart()
    row["library"] = (
        theirs
        if isinstance(theirs, str)
        else {"loss": theirs["loss"], "eval_loss": theirs["eval_loss"]}
    )
    return row


def beyond(rows: list[dict[str, Any]]) -> list[str]:
    """The figures that are further from one process than ``BOUND``, are no numbers or are missing, a line each."""
    return [
        f"{row['name']}, on {name}: {figure} is {value:.1e} from one process, more than {BOUND:g}"
        for row in rows
        for name in RINGS
        for figure, value in (dict.fromkeys(COLUMNS, math.nan) | row[name]).items()
        if not value <= BOUND and (name, figure) not in MEANS
    ]


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table in Markdown, each figure the largest of all rings, and below it what the library did, each once."""
    table = [
        "| trainer | losses | gradient norms | evaluation loss | weights |",
        "| --- | --- | --- | --- | --- |",
    ]
    theirs: dict[str, list[str]] = {}
    for row in rows:
        numbers = [
            f"{max(row[ring].get(key, math.nan) for ring in RINGS):.1e}"
            for key in COLUMNS
        ]
        table.append(f"| {row['name']} | {' | '.join(numbers)} |")
        theirs.setdefault(said(row), []).append(row["name"])
    about = "The same scripts with accelerate's `ParallelismConfig(cp_size=2)` and FSDP2 on two CPU processes:"
    fewest = sorted(theirs, key=lambda text: len(theirs[text]))
    names = ["; ".join(theirs[text]) for text in fewest[:-1]] + [
        "The others" if len(fewest) > 1 else "All"
    ]
    return [
        *table,
        "",
        about,
        "",
        *(f"- {name}: {text}" for name, text in zip(names, fewest, strict=True)),
    ]


def said(row: dict[str, Any]) -> str:
    """The result of the library's own context parallelism."""
    theirs, one = row["library"], row["one process"]
    if isinstance(theirs, str):
        return theirs.replace("`", "")
    last = theirs["eval_loss"][-1] if theirs["eval_loss"] else float("nan")
    return f"loss {theirs['loss'][0]:.4f} for {one['loss'][0]:.4f}, evaluation {last:.4f} for {one['eval_loss']:.4f}"


def main(wanted: list[str]) -> None:
    """Measure the cases of these names, all without names, and write after each; then fail where the table is beyond
    its bound.
    """
    serve_forks("tests.hf.trainers")
    releases = {
        module.__name__: module.__version__
        for module in (torch, transformers, accelerate, trl)
    }
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = {row["name"]: row for row in kept}
    pools = {
        ranks: Pool(ranks, launched=True, timeout_seconds=900)
        for ranks, _ in RINGS.values()
    }
    try:
        for case in CASES:
            if not wanted or case.name in wanted:
                rows[case.name] = measured(case, pools)
                write([rows[one.name] for one in CASES if one.name in rows], releases)
    finally:
        for pool in pools.values():
            pool.close()
    if found := beyond(list(rows.values())):
        sys.exit("\n".join(found))


def write(rows: list[dict[str, Any]], releases: dict[str, str]) -> None:
    made = {
        "command": "python -m tests.hf.table",
        "machine": describe_machine(),
        "releases": releases,
    }
    RESULT.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, "", *lines(rows), "", END]) + after)


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - {case.name for case in CASES}:
        sys.exit(
            f"no case {min(unknown)!r}; there are: {', '.join(case.name for case in CASES)}"
        )
    main(sys.argv[1:])
