"""Inventory and speed of a machine or cluster, and what keeps it from training."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringspan.core import reference
from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import (
    Mask,
    causal,
    chunked,
    documents,
    full,
    prefix_lm,
    sliding_window,
)
from ringspan.core.messages.extras import command, installed
from ringspan.core.messages.units import shown_speed
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.bench.ring import alone
from ringspan.measure.cluster.cluster import (
    Problem,
    examine_ranks,
    problems_between,
    versions,
)
from ringspan.measure.cluster.host import launch_seconds
from ringspan.measure.cluster.trial import WRONG, Trial, try_training
from ringspan.measure.machine import (
    default_ranks,
    describe_machine,
    fastest,
    measure_flops,
    num_cores,
    package_version,
)
from ringspan.plan.cluster.hardware import min_block_tokens
from ringspan.torch.engine import kernels
from ringspan.torch.engine.attention.arguments import check_tensors
from ringspan.torch.engine.attention.op import ring_attention
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.engine.transport.collectives import gather
from ringspan.torch.runtime.dtypes import dtype_named
from ringspan.torch.runtime.host import host_memory_bytes
from ringspan.torch.runtime.launch import join, launch, local_device
from ringspan.torch.runtime.mesh import make_mesh, set_timeout
from ringspan.torch.runtime.requirements import pip_command, shown, supported
from ringspan.torch.runtime.seams import missing

_NEEDED: Final = ("torch", "transformers")  # the others are optional
# Optional packages, with what uses them and how to install them.
_OPTIONAL: Final = {
    "datasets": ("training from a TOML file, and the demo", command("datasets")),
    "tensorboard": ("TensorBoard files of a training run", command("tensorboard")),
    "matplotlib": ("pictures of profiles, plans and reports", command("matplotlib")),
    "jax": ("the JAX back end", command("jax")),
    "liger_kernel": ("the fused loss on CUDA", "pip install liger-kernel"),
    "torchao": ("AdamW with moments in 8 bits", "pip install torchao"),
}
_MEASURED_DTYPES: Final = ("bfloat16", "float32")
_SLOW_RANK: Final = 0.7  # a rank is slow below this share of the median speed
_TRIAL_SECONDS: Final = 120.0  # a rank then no longer waits for one that failed
_WRONG: Final = 1e-5  # relative error of the ring in float32; rounding gives 1e-6
# Sizes of the cases that kernels are asked about.
_RANKS: Final = 4
_LENGTH: Final = 16384
_HEADS: Final = 8
_NO_CUDA: Final = "it needs a CUDA device, and this machine has none"


def examine(
    ranks: int | None, doing: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Return the report on this machine: its ranks and links, a model that trains, the host, devices and kernels."""
    ranks = default_ranks() if ranks is None else ranks
    doing(
        f"measuring {ranks} rank{'s' if ranks != 1 else ''} and the links between them"
    )
    try:
        examined = launch(examine_rank, ranks)[0]
    except RuntimeError as error:
        remedy = "ranks of one machine talk over its loopback interface; look at its firewall, memory and limits"
        return report(
            None,
            [
                Problem(
                    f"{ranks} ranks of this machine do not come together: {error}",
                    remedy,
                    True,
                )
            ],
        )
    doing("training a model of two layers")
    trial = outcome_of(launch(examine_training, ranks))
    host = None
    if trial.failure is None:
        doing("timing the host")
        host = launch(launch_seconds, 1)[0]
    doing("looking at devices and kernels")
    return report(examined, trial=trial, launching=host)


def examine_training() -> Trial:
    """Try to train on the ranks that were started; none waits long for another that failed."""
    set_timeout(dist.group.WORLD, _TRIAL_SECONDS)
    return try_training(make_mesh(local_device().type, 1, dist.get_world_size(), 1))


def outcome_of(trials: Sequence[Trial]) -> Trial:
    """Return the earliest failure, since a rank's peers fail after it, or the common outcome of all ranks."""
    failures = [
        trial._replace(failure=f"rank {rank}: {trial.failure}")
        for rank, trial in enumerate(trials)
        if trial.failure
    ]
    return min(failures, key=lambda trial: trial.failed_at or 0.0, default=trials[0])


def examine_job(
    timeout_seconds: float = 120.0, doing: Callable[[str], None] = lambda what: None
) -> tuple[dict[str, Any], bool]:
    """Return the findings of ``examine`` for a job of torchrun, and whether this rank prints them."""
    is_first = os.environ["RANK"] == "0"
    doing("measuring the ranks of this job and the links between them")
    try:
        join(timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        what = f"rank {os.environ['RANK']} does not meet the others at {place}: {str(error).splitlines()[0]}"
        remedy = "this address must be open to every host of the job, and all ranks must be started"
        return report(None, [Problem(what, remedy, stops=True)]), True
    try:
        examined = examine_rank()
        doing("training a model of two layers")
        trial = examine_training()
        # A rank that failed reports its own failure; its exit ends the job, including ranks that wait.
        return report(examined, trial=trial), is_first or trial.failure is not None
    finally:
        dist.destroy_process_group()


def examine_rank() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None, "called inside of a process group"
    examined = examine_ranks(group)
    # All ranks compute at the same time, as in training, since ranks of one machine share its cores.
    dist.barrier(group)
    speeds = gather(measure_speeds(local_device()), group)
    return examined | {"speeds": speeds, "ring_error": ring_error(group)}


def measure_speeds(device: torch.device) -> list[dict[str, Any]]:
    return [
        {"what": what, "dtype": dtype, "flops": measure(device, dtype_named(dtype))}
        for what, measure in (("matmul", measure_flops), ("attention", attention_flops))
        for dtype in _MEASURED_DTYPES
    ]


def report(
    examined: dict[str, Any] | None,
    failures: Iterable[Problem] = (),
    trial: Trial | None = None,
    launching: float | None = None,
) -> dict[str, Any]:
    """Return the report on machine, ranks and problems; ``min_block_tokens`` is F/B of the slowest rank."""
    device = local_device()
    problems = [*_problems_here(device), *failures]
    speeds = examined["speeds"] if examined else [measure_speeds(device)]
    slowest = [
        min(each, key=lambda speed: speed["flops"])
        for each in zip(*speeds, strict=True)
    ]
    flops = next(
        each["flops"]
        for each in slowest
        if (each["what"], each["dtype"]) == ("matmul", "bfloat16")
    )
    bandwidth = examined["bandwidth_bytes_per_second"] if examined else None
    if examined:
        problems += [
            *problems_between(examined),
            *_slow_ranks(speeds, examined["ranks"]),
        ]
        if not examined["ring_error"] < _WRONG:
            problems.append(
                Problem(
                    f"ring attention of {len(examined['ranks'])} ranks is wrong: relative error "
                    f"{examined['ring_error']:.1e} against float64, {_WRONG:.0e} is the most that rounding explains",
                    "this build of torch, or its communication library, computes or carries wrongly: try another one",
                    stops=True,
                )
            )
    if trial is not None:
        problems += _problems_of(trial)
    kinds = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])
    return {
        "devices": _devices(),
        "backends": {
            name: _has_backend(name) for name in ("gloo", "nccl", "mpi", "ucc")
        },
        "versions": versions(),
        "missing": [
            {"name": name, "needed_for": purpose, "remedy": remedy}
            for name, (purpose, remedy) in _OPTIONAL.items()
            if not installed(name)
        ],
        "machine": describe_machine(),
        "kernels": kernel_report(kinds),
        "flops": flops,
        "measured_flops": slowest,
        "bandwidth_bytes_per_second": bandwidth,
        "min_block_tokens": round(min_block_tokens(flops, bandwidth))
        if bandwidth
        else None,
        "cluster": examined,
        "trial": None if trial is None else trial._asdict(),
        "launch_seconds": launching,
        "can_train": not any(problem.stops for problem in problems),
        "problems": [asdict(problem) for problem in problems],
    }


def _problems_of(trial: Trial) -> Iterator[Problem]:
    if trial.failure is not None:
        yield Problem(
            f"a model of two layers does not train here: {trial.failure}",
            _tried_releases()
            or "this is where training would end: report it with what `ringspan doctor --json` prints",
            stops=True,
        )
    elif not (trial.error or 0.0) < WRONG:
        yield Problem(
            f"a model of two layers trains wrongly here: its losses differ from one process by {trial.error:.1e}, "
            f"{WRONG:.0e} is the most that rounding explains",
            _tried_releases()
            or "this build of torch, or its communication library, computes wrongly: try another one",
            stops=True,
        )


def _tried_releases() -> str | None:
    """Return the commands that install releases which ringspan was tried with, of packages that are newer."""
    newer = [name for name in _NEEDED if _is_beyond(name)]
    return "; ".join(pip_command(name) for name in newer) or None


def _is_beyond(name: str) -> bool:
    """Return whether a package is newer than all releases that ringspan was tried with."""
    here = package_version(name)
    bounds = [bound for bound in supported(name) if bound.operator == "<"]
    return here is not None and any(
        Version(Version(here).base_version) >= Version(bound.version)
        for bound in bounds
    )


def _has_backend(name: str) -> bool:
    return dist.is_available() and getattr(dist, f"is_{name}_available")()


def _slow_ranks(
    speeds: list[list[dict[str, Any]]], facts: list[dict[str, Any]]
) -> Iterator[Problem]:
    flops = [speed[0]["flops"] for speed in speeds]
    usual = median(flops)
    for rank, reached in enumerate(flops):
        if reached < _SLOW_RANK * usual:
            yield Problem(
                f"rank {rank} on {facts[rank]['host']} multiplies at {shown_speed(reached)}, the median rank at "
                f"{shown_speed(usual)}",
                "a ring is as slow as its slowest rank: look for other programs on that device, and for its clocks",
            )


def _devices() -> list[dict[str, Any]]:
    name = describe_machine()["processor"]
    found = [
        {
            "kind": "cpu",
            "name": name,
            "cores": num_cores(),
            "memory_bytes": host_memory_bytes(),
        }
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        made = {
            "kind": "cuda",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
        }
        free = torch.cuda.mem_get_info(index)[0]
        found.append(
            made | {"memory_bytes": properties.total_memory, "free_bytes": free}
        )
    return found


def _problems_here(device: torch.device) -> Iterator[Problem]:
    """Yield what is wrong with this machine's packages and torch build: versions, missing parts, backend, CUDA."""
    for name in _NEEDED:
        here = package_version(name) or "none"
        if _is_beyond(name):
            # It may work anyway: the trial run decides, so this does not stop.
            yield Problem(
                f"{name} is {here}, newer than any release that ringspan was tried with",
                pip_command(name),
            )
        elif here == "none" or not supported(name).contains(
            Version(here).base_version, prereleases=True
        ):
            yield Problem(
                f"{name} is {here}, {shown(supported(name))} is needed",
                pip_command(name),
                stops=True,
            )
    for name in missing():
        yield Problem(
            f"torch {torch.__version__} lacks {name}, which ringspan needs",
            pip_command("torch"),
            stops=True,
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not _has_backend(backend):
        remedy = f"install a build of torch with {backend}: those for Linux on pytorch.org have it"
        yield Problem(
            f"torch has no {backend}, over which {device.type} ranks talk",
            remedy,
            stops=True,
        )
    if device.type == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
        why = (
            "is a build for CPUs"
            if torch.version.cuda is None
            else f"of CUDA {torch.version.cuda} cannot use them"
        )
        remedy = "install a build of torch for the CUDA version that nvidia-smi shows"
        yield Problem(
            f"this machine has NVIDIA devices, but torch {torch.__version__} {why}",
            remedy,
        )


def attention_flops(
    device: torch.device, dtype: torch.dtype, *, tokens: int | None = None
) -> float:
    """Return the best FLOP/s of causal attention, both passes, with the ring's kernel."""
    # 8 heads of 128; 14 FLOPs per pair and entry of a head: two matrix products forward, five backward.
    heads, head_dim, tokens = (
        8,
        128,
        tokens or (8192 if device.type == "cuda" else 1024),
    )
    q, k, v, dout = (
        torch.randn(1, heads, tokens, head_dim, device=device).to(dtype)
        for _ in range(4)
    )
    schedule, scores = (
        make_schedule(Layout("contiguous", tokens, 1), causal(), 0),
        Scores(head_dim**-0.5),
    )
    kernel = kernels.choose(
        kernels.serving("auto", q, v, scores), schedule.hops[0].bands, q
    )
    passes = alone(kernel.name, schedule, scores, dout, q, k, v)

    def both() -> None:
        passes["forward"]()
        passes["backward"]()

    return 14.0 * schedule.num_pairs * heads * head_dim / fastest(both, device)


def ring_error(group: dist.ProcessGroup) -> float:
    """Return any rank's largest relative error of causal attention, both passes, against dense float64."""
    ranks, rank, device = (
        dist.get_world_size(group),
        dist.get_rank(group),
        local_device(),
    )
    # Few tokens, as every rank also computes dense attention of all of them.
    layout = Layout("zigzag", 2 * max(1, min(24, 512 // ranks)) * ranks, ranks)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, heads, layout.length, 16, generator=generator)
        for heads in (4, 2, 2, 4)
    ]
    mine = layout.positions(rank)
    *inputs, dout = (
        x[:, :, torch.from_numpy(mine)].to(device).requires_grad_() for x in whole
    )
    out = ring_attention(*inputs, layout=layout, group=group)
    gradients = torch.autograd.grad(out, inputs, dout)

    q, k, v, d = (x.double().numpy() for x in whole)
    problem = (q, k, v, causal().dense(*2 * [np.arange(layout.length)]), 16**-0.5)
    expected = reference.attention(*problem)[0], *reference.backward(d, *problem)
    error = max(
        _relative(ours, exact[:, :, mine])
        for ours, exact in zip((out, *gradients), expected, strict=True)
    )
    worst = torch.tensor(error, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return float(worst)


def _relative(ours: Tensor, exact: np.ndarray) -> float:
    return float(
        np.linalg.norm(ours.detach().double().cpu().numpy() - exact)
        / np.linalg.norm(exact)
    )


@dataclass(frozen=True)
class Case:
    """A kind of attention on a zigzag ring of four: mask, scores, dtype, head sizes."""

    mask: Mask = causal()  # noqa: RUF009 - a Mask is frozen
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    value_dim: int = 128
    softcap: float = 0.0
    has_slopes: bool = False


CASES: Final[dict[str, Case]] = {
    "full": Case(full()),
    "causal": Case(),
    "window": Case(sliding_window(2800)),
    "prefix-LM": Case(prefix_lm(2000)),
    "documents": Case(documents([1200, 6000, 4000, 5184])),
    "documents in a window": Case(documents([1200, 6000, 4000, 5184], window=2800)),
    "chunks": Case(chunked(2400, length=_LENGTH)),
    "causal, float16": Case(dtype=torch.float16),
    "causal, float32": Case(dtype=torch.float32),
    "short documents, float32": Case(documents([512] * 32), dtype=torch.float32),
    "causal, float64": Case(dtype=torch.float64),
    "causal, soft cap (Gemma 2)": Case(softcap=50.0),
    "causal, ALiBi": Case(has_slopes=True),
    "causal, head sizes 192 and 128 (MLA)": Case(head_dim=192),
    "causal, head size 320": Case(head_dim=320, value_dim=320),
}


def serving(case: Case, where: torch.device) -> dict[str, float]:
    """Return the kernels that compute a case on a device with their shares of its pairs; empty if refused."""
    layout = Layout("zigzag", _LENGTH, _RANKS)
    hops = (
        hop
        for rank in range(_RANKS)
        for hop in make_schedule(layout, case.mask, rank).hops
        if hop.bands
    )
    pairs: Counter[str] = Counter()
    with FakeTensorMode():
        q, v = (
            torch.empty(1, _HEADS, 1, d, dtype=case.dtype, device=where)
            for d in (case.head_dim, case.value_dim)
        )
        try:
            check_tensors(q, q, v)
        except UnsupportedError:
            return {}
        scores = Scores(
            case.head_dim**-0.5,
            case.softcap,
            torch.empty(1, device=where) if case.has_slopes else None,
        )
        names = kernels.serving("auto", q, v, scores)
        for hop in hops:
            pairs[kernels.choose(names, hop.bands, q).name] += hop.num_pairs
    return {name: count / pairs.total() for name, count in pairs.most_common()}


def kernel_report(devices: list[torch.device]) -> dict[str, dict[str, Any]]:
    """Describe each kernel: whether it runs on any device, its largest share of each case, or why it does not run."""
    served: dict[str, dict[str, float]] = {name: {} for name in kernels.KERNELS}
    for where in devices:
        for title, case in CASES.items():
            for name, share in serving(case, where).items():
                served[name][title] = max(share, served[name].get(title, 0.0))
    report: dict[str, dict[str, Any]] = {}
    for name in kernels.KERNELS:
        reasons = [_why_not(name, where) for where in devices]
        runs = None in reasons
        # Give the last device's reason: that is the GPU if there is one, and the CPU's would tell nothing then.
        report[name] = {
            "available": runs,
            "serves": served[name],
            "why_not": None if runs else reasons[-1],
        }
    return report


def _why_not(name: str, where: torch.device) -> str | None:
    """Return why a kernel cannot compute plain bfloat16 attention on a device, or None."""
    with FakeTensorMode():
        probe = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=where)
        why = kernels.why_not(name, probe, probe, Scores(1.0))
    # A kernel's reason is about tensors; this report is about the machine.
    return _NO_CUDA if why and why.startswith("it needs CUDA tensors") else why
