"""The longest sequence on which a Llama of 100M parameters takes one whole training step within a budget of memory.

python -m benchmarks.context --budget 6e9 --options on
"""

import json
import math
import resource
import shutil
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import ringspan
from benchmarks.thin import thin_attention
from ringspan.cli.checks import check_dtype
from ringspan.cli.commands.bench import Dtype, LayoutOption, Ranks
from ringspan.core.errors import ConfigError
from ringspan.core.geometry.layout import layout_name
from ringspan.core.names import LayoutName
from ringspan.measure.machine import describe_machine, peak_bytes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import host_bytes
from ringspan.plan.model.configs import from_config
from ringspan.torch.engine.transport.clock import synchronize
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import launch, local_device
from ringspan.torch.runtime.mesh import init_mesh
from ringspan.torch.shard_batch import shard_batch

OptionsName = Literal["on", "off"]
# Everything that keeps activations small, and nothing of it: whole logits, whole layers.
OPTIONS: Final[dict[OptionsName, dict[str, Any]]] = {
    "on": {
        "checkpoint": "attention",
        "loss_chunk_tokens": 512,
        "feedforward_chunk_tokens": 1024,
        "offload": "activations",
    },
    "off": {"checkpoint": "none", "loss_chunk_tokens": 1 << 30},
}


@dataclass(frozen=True, kw_only=True)
class ContextCase:
    """A model, a ring and a budget for all of its ranks together; ``max_trials`` steps are tried at most.

    ``folds`` are computed one after the other. ``rows_in`` above 1 computes one row in so many of attention
    (``benchmarks.thin``), on a CPU alone.
    """

    ranks: int = 2
    budget_bytes: int = 16 * 10**9
    options: OptionsName = "on"
    layers: int = 12
    hidden_size: int = 768
    heads: int = 12
    kv_heads: int = 4
    vocabulary: int = 32000
    dtype: str = "float32"
    layout: LayoutName = "zigzag"
    start_tokens: int = 1024
    max_length: int = 1 << 24
    max_trials: int = 8
    rows_in: int = 1
    folds: int = 1


def run(case: ContextCase) -> dict[str, Any]:
    """Try lengths, each in processes of their own, until the longest that fits is known within 3%, or trials run out.

    Memory grows linearly with the length, so the next length is where a line through the last two trials meets the
    budget; it stays between the longest that fitted and the shortest that did not, and within what the disk has room
    for where activations wait on it.

    Raises:
        ConfigError: not even ``start_tokens`` fit, or attention is to be thinned on a device that is no CPU.
    """
    if case.rows_in > 1 and local_device().type != "cpu":
        raise ConfigError(
            f"--rows-in {case.rows_in}: attention is thinned on a CPU alone; leave it out"
        )
    longest = _longest(case)
    if longest < min(case.start_tokens, case.max_length):
        raise ConfigError(
            f"--start {case.start_tokens}: {tempfile.gettempdir()} has room for the activations of {longest:,} tokens; "
            "set TMPDIR to a folder on a disk with more"
        )
    trials: list[dict[str, Any]] = []
    length = case.start_tokens
    while length and len(trials) < case.max_trials:
        trials.append(_try(case, length))
        length = next_length(trials, case.budget_bytes, longest)
    fitting = [trial for trial in trials if trial["peak_bytes"] <= case.budget_bytes]
    if not fitting:
        raise ConfigError(
            f"--budget {case.budget_bytes}: a step of {case.start_tokens} tokens takes "
            f"{min(trial['peak_bytes'] for trial in trials):,.0f} bytes in all; raise it"
        )
    best = max(fitting, key=lambda trial: trial["length"])
    return {
        "max_length_tokens": best["length"],
        "budget_bytes": case.budget_bytes,
        "options": OPTIONS[case.options],
        "step_seconds": best["step_seconds"],
        "parameters": best["parameters"],
        "trials": trials,
        "config": asdict(case),
        "machine": describe_machine(),
    }


def _longest(case: ContextCase) -> int:
    """``max_length``, or as many tokens as the temporary folder can hold what is offloaded of, if those are fewer."""
    options = OPTIONS[case.options]
    if "offload" not in options or local_device().type != "cpu":
        return case.max_length
    setting = Setting(
        length=case.start_tokens,
        ring=case.ranks,
        checkpoint=options["checkpoint"],
        compute_dtype=case.dtype,
        folds=case.folds,
        offload=options["offload"],
        on_gpu=False,
    )
    shape = from_config(
        _config(case, case.start_tokens).to_dict(), "the benchmark's model"
    )
    room = shutil.disk_usage(tempfile.gettempdir()).free
    return min(case.max_length, room * setting.tokens // host_bytes(shape, setting))


def next_length(trials: list[dict[str, Any]], budget_bytes: int, longest: int) -> int:
    """The length to try after these trials (each with "length" and "peak_bytes"); 0 when none is worth it."""
    low = max(
        (t["length"] for t in trials if t["peak_bytes"] <= budget_bytes), default=0
    )
    high = min(
        (t["length"] for t in trials if t["peak_bytes"] > budget_bytes),
        default=longest + 1,
    )
    if not low or high - low <= max(1, 0.03 * low):
        return 0
    finite = sorted(
        (t["length"], t["peak_bytes"]) for t in trials if math.isfinite(t["peak_bytes"])
    )
    # With one trial there is no line yet.
    proposal = 2 * low
    if len(finite) > 1:
        # The two longest: what is there at any length counts least in them.
        (a, at_a), (b, at_b) = finite[-2:]
        slope = (at_b - at_a) / (b - a)
        if slope > 0:
            proposal = int(0.99 * (low + (budget_bytes - dict(finite)[low]) / slope))
    # A line that leads out of the interval has met something that is not linear: halve it.
    if high <= longest and not low < proposal < high:
        proposal = (low + high) // 2
    # a proposal next to one that is known would teach nothing
    step = math.ceil(0.01 * low)
    return max(low + step, min(proposal, high - step, 8 * low))


def _try(case: ContextCase, length: int) -> dict[str, Any]:
    """One step of this length; a peak of infinity where memory ran out."""
    try:
        # Processes of their own: what one trial left in an allocator would count in the next.
        results = launch(_measure, case.ranks, case, length, threads=1, is_thrifty=True)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        return {
            "length": length,
            "peak_bytes": math.inf,
            "parameters": 0,
        } | dict.fromkeys(("step_seconds", "loss"), math.nan)
    return {
        "length": length,
        "peak_bytes": sum(result["peak_bytes"] for result in results),
        "step_seconds": max(result["step_seconds"] for result in results),
        "parameters": results[0]["parameters"],
        "loss": results[0]["loss"],
    }


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether a rank failed for lack of memory: an allocation that raised, or the kernel's killer."""
    return "memory" in str(error).lower() or "SIGKILL" in str(error)


def _measure(case: ContextCase, length: int) -> dict[str, Any]:
    device = local_device()
    if device.type == "cpu":
        # A length that is far too long fails here, rather than by what the system does to the machine's programs.
        limit = int(1.5 * case.budget_bytes / case.ranks) + (2 << 30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with thin_attention(case.rows_in) if case.rows_in > 1 else nullcontext():
        return _step(case, length, device)


def _step(case: ContextCase, length: int, device: torch.device) -> dict[str, Any]:
    mesh = init_mesh(ring=case.ranks)
    split: Any = {"layout": case.layout, "folds": case.folds}
    model = parallelize(_llama(case, length), mesh, **split, **OPTIONS[case.options])
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = _text(length).unsqueeze(0)
    batch = shard_batch(
        {"input_ids": tokens, "labels": tokens}, mesh, **split, device=device
    )
    dist.barrier()
    started = time.perf_counter()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    synchronize(device)
    seconds = time.perf_counter() - started
    # A step that computed nonsense is no length that fits.
    if not math.isfinite(loss := float(loss.detach())):
        raise AssertionError(f"the loss of {length} tokens is {loss}")
    return {
        "peak_bytes": peak_bytes(device),
        "step_seconds": seconds,
        "parameters": parameters,
        "loss": loss,
    }


def _llama(case: ContextCase, length: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = _config(case, length)
    return (
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
        .to(local_device())
        .train()
    )


def _config(case: ContextCase, length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden_size,
        intermediate_size=8 * case.hidden_size // 3,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )


def _text(length: int) -> torch.Tensor:
    """The bytes of ringspan's own source, over and over."""
    paths = sorted(Path(ringspan.__file__).parent.rglob("*.py"))
    source = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8
    )
    return source.repeat(-(-length // len(source)))[:length].long()


def main(
    budget: Annotated[
        float,
        typer.Option(min=1, max=1e18, help="Bytes of memory for all ranks together."),
    ] = 16e9,
    ranks: Ranks = 2,
    options: Annotated[
        str, typer.Option(help="on or off: everything that keeps activations small.")
    ] = "on",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the Llama.")] = 12,
    hidden_size: Annotated[
        int, typer.Option(min=12, help="Its hidden size; a multiple of 24.")
    ] = 768,
    vocabulary: Annotated[int, typer.Option(min=256, help="Its vocabulary.")] = 32000,
    dtype: Dtype = "float32",
    layout: LayoutOption = "zigzag",
    trials: Annotated[
        int,
        typer.Option(
            min=1, help="Steps to try at most; time grows as their lengths squared."
        ),
    ] = 8,
    start: Annotated[int, typer.Option(min=1, help="Length to try first.")] = 1024,
    max_length: Annotated[
        int, typer.Option(min=1024, help="Longest sequence to try.")
    ] = 1 << 24,
    rows_in: Annotated[
        int,
        typer.Option(
            min=1,
            help="Compute one row in so many of attention (CPU): a step's memory without its time.",
        ),
    ] = 1,
    folds: Annotated[
        int,
        typer.Option(
            min=1, help="Parts of a sequence that are computed one after the other."
        ),
    ] = 1,
) -> None:
    """Search, and print the result as one JSON object."""
    check_dtype(dtype)
    if options not in OPTIONS:
        raise ConfigError(f"--options {options!r}: choose one of {', '.join(OPTIONS)}")
    if hidden_size % 24:
        raise ConfigError(
            f"--hidden-size {hidden_size}: is no multiple of 24 (twelve heads of an even size)"
        )
    case = ContextCase(
        ranks=ranks,
        budget_bytes=int(budget),
        options=options,
        layers=layers,
        hidden_size=hidden_size,
        vocabulary=vocabulary,
        dtype=dtype,
        layout=layout_name(layout),
        start_tokens=start,
        max_trials=trials,
        max_length=max_length,
        rows_in=rows_in,
        folds=folds,
    )
    print(json.dumps(run(case)))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import context

    typer.run(context.main)
