"""``ringspan rehearse``: one rank of a planned cluster, for real, on the device at hand."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.checks import AsJson
from ringspan.cli.commands import plan
from ringspan.cli.console import console, facts, table, working
from ringspan.core.errors import ConfigError
from ringspan.core.messages.units import (
    shown_bandwidth,
    shown_bytes,
    shown_seconds,
    shown_speed,
)

if TYPE_CHECKING:
    from ringspan.measure.trace.rehearsal import Rehearsal
    from ringspan.plan.planner import Plan

EPILOG = "Example: ringspan rehearse --model llama-3.1-8b --devices 32 --device h100 --length 524288 --rank 5"


def command(
    model: plan.Model = "llama-3.1-8b", devices: plan.Devices = 8, device: plan.Device = "h100-80gb",
    nodes: plan.Nodes = None, length: plan.Length = 131_072, batch: plan.Batch = 1, dtype: plan.Dtype = "bfloat16",
    parameter_dtype: plan.ParameterDtype = "float32", route: plan.Route = "auto", comm_dtype: plan.CommDtype = "exact",
    rank: Annotated[int, typer.Option(min=0, help="The rank to run.")] = 0,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes/s of the link from the neighbour; default: as for this device.")
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run one rank of the planned step on this machine's device: real kernels and memory, random neighbours' blocks.

    Measures peak memory, seconds of a step and of each layer, and their share of the matmul speed; predicts what links
    add.
    """
    from ringspan.measure.trace.rehearsal import rehearse_plan
    from ringspan.plan.planner import make_plan

    question = plan.question_of(
        model,
        device,
        devices,
        nodes,
        length=length,
        batch=batch,
        dtype=dtype,
        parameter_dtype=parameter_dtype,
        route=route,
        comm_dtype=comm_dtype,
    )
    answer = make_plan(question)
    setting = answer.setting
    link = (
        answer.question.device.bandwidth(setting.ring * setting.tp)
        if bandwidth is None
        else bandwidth
    )
    if not 0 < link < float("inf"):
        raise ConfigError(
            f"--bandwidth {bandwidth}: should be a positive number of bytes/s"
        )
    with working() as doing:
        measured = rehearse_plan(answer, rank, link, doing)
        doing("measuring matrix products")
        result = answer.as_json() | _measured(answer, measured)
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)


def _measured(answer: "Plan", measured: "Rehearsal") -> dict[str, Any]:
    """Return the measured part of the result: bytes, seconds of the whole step, its utilization, and a prediction.

    The predicted step is the measured one plus waits for links, or the transfers themselves if these take longer.
    """
    from ringspan.measure.machine import describe_machine, measure_flops
    from ringspan.plan.cost.cost import model_flops
    from ringspan.torch.runtime.dtypes import dtype_named
    from ringspan.torch.runtime.launch import local_device

    question, setting = answer.question, answer.setting
    micro_steps = question.batch // (setting.replicate * setting.batch)
    step_seconds = micro_steps * measured.step_seconds
    flops = (
        question.batch * model_flops(question.shape, setting.length) / question.devices
    )
    matmul_flops = measure_flops(local_device(), dtype_named(setting.compute_dtype))
    predicted = max(
        step_seconds + micro_steps * measured.exposed_seconds,
        (answer.cost.ring_bytes + answer.cost.shard_bytes) / measured.bandwidth,
    )
    return {
        "rank": measured.rank,
        "measured_peak_bytes": measured.peak_bytes,
        "measured_reserved_bytes": measured.reserved_bytes,
        "measured_bytes": measured.bytes,
        "measured_step_seconds": step_seconds,
        "measured_matmul_utilization": flops / step_seconds / matmul_flops,
        "measured_matmul_flops": matmul_flops,
        "layers": [
            {"forward_seconds": f, "backward_seconds": b}
            for f, b in measured.layer_seconds
        ],
        "bandwidth_bytes_per_second": measured.bandwidth,
        "predicted_exposed_seconds": predicted - step_seconds,
        "predicted_step_seconds": predicted,
        "machine": describe_machine(),
    }


def _show(result: dict[str, Any]) -> None:
    """Print planned and measured bytes by category, then the times of one step."""
    from statistics import median

    out = console()
    names = (*result["bytes"], "peak, kernels' own included", "held by the allocator")
    held = {
        "": result["peak_bytes"] + result["reserve_bytes"],
        "measured_": result["measured_reserved_bytes"],
    }
    planned, measured = (
        (*result[f"{kind}bytes"].values(), result[f"{kind}peak_bytes"], total)
        for kind, total in held.items()
    )
    rows = [
        (name, shown_bytes(p), shown_bytes(m))
        for name, p, m in zip(names, planned, measured, strict=True)
    ]
    title = f"rank {result['rank']} of {plan.shown_mesh(result)}, on {result['machine']['device']}: bytes at the peak"
    table(out, title, ["category", "planned", "measured"], rows, numbers=2)
    forward, backward = (
        shown_seconds(median(each[f"{way}_seconds"] for each in result["layers"]))
        for way in ("forward", "backward")
    )
    step, exposed, whole = (
        shown_seconds(result[f"{name}_seconds"])
        for name in ("measured_step", "predicted_exposed", "predicted_step")
    )
    link = shown_bandwidth(result["bandwidth_bytes_per_second"])
    matmul = shown_speed(result["measured_matmul_flops"])
    share = f"{result['measured_matmul_utilization']:.1%} of the {matmul} that matrix products reach here"
    computing = f"{step}; a layer {forward} forward, {backward} backward"
    waiting = f"{exposed} more at {link}, so {whole} per step"
    facts(
        out,
        "one step",
        [
            ("computing", computing),
            ("model FLOPs used", share),
            ("waiting for links", waiting),
        ],
    )
