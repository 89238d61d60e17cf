"""``ringspan profile``: where memory and time of a training step go, on real ranks, as pictures."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringspan.cli.checks import (
    AsJson,
    LocalRanks,
    check_folder,
    on_ranks,
    refuse_under_torchrun,
)
from ringspan.cli.commands import plan
from ringspan.cli.console import say
from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import require
from ringspan.core.messages.units import shown_bytes, shown_seconds
from ringspan.torch.runtime.environment import is_rank

if TYPE_CHECKING:
    from ringspan.measure.trace.profile import RankProfile
    from ringspan.plan.cost.setting import Setting

EPILOG = (
    "Example: ringspan profile --model ./my-model --ranks 2 --length 8192 --out profile. "
    "On a cluster: torchrun --nnodes 2 --nproc-per-node 8 ... -m ringspan profile --length 131072. "
    "Of a training run of your own: profile = true in its TOML file."
)


def command(
    model: plan.Model = "qwen3-0.6b",
    ranks: LocalRanks = None,
    length: plan.Length = 4096,
    batch: Annotated[
        int, typer.Option(min=1, max=1 << 30, help="Sequences per micro-step.")
    ] = 1,
    layout: Annotated[
        str, typer.Option(help="zigzag, striped or contiguous.")
    ] = "zigzag",
    route: Annotated[
        str,
        typer.Option(
            help="ring, bidirectional, double-ring:I, all-gather, ulysses[:U]."
        ),
    ] = "ring",
    checkpoint: Annotated[
        str, typer.Option(help="none, attention or full.")
    ] = "attention",
    layers_per_checkpoint: Annotated[
        int, typer.Option(min=1, help="Layers that share one kept input.")
    ] = 1,
    dtype: plan.Dtype = "bfloat16",
    parameter_dtype: plan.ParameterDtype = "float32",
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, PNG files and profile.json.")
    ] = Path("profile"),
    as_json: AsJson = False,
) -> None:
    """Run three steps of a model with random weights on a ring, and draw each rank's memory and hops.

    Writes an HTML file with a memory timeline by category and a hop timeline with computing, transfers and waits.
    """
    check_folder("--out", out)
    require("ringspan profile", "matplotlib")

    from ringspan.core.geometry.layout import Layout, layout_name
    from ringspan.core.names import checkpoint_name
    from ringspan.core.schedule.choice import check_segments
    from ringspan.core.step_config import StepConfig
    from ringspan.measure.machine import default_ranks
    from ringspan.measure.trace.dry_run import hugging_face_config
    from ringspan.measure.trace.profile import profile_rank
    from ringspan.measure.trace.rehearsal import refuse_local_ranks
    from ringspan.plan.cost.setting import Setting
    from ringspan.plan.model.configs import model_shape
    from ringspan.torch.model.support import refuse_route

    under_torchrun = is_rank()
    if under_torchrun:
        refuse_under_torchrun(ranks=ranks)
    ring = (
        int(os.environ["WORLD_SIZE"])
        if under_torchrun
        else default_ranks()
        if ranks is None
        else ranks
    )
    setting = Setting(
        length=length,
        ring=ring,
        batch=batch,
        layout=layout_name(layout),
        route=route,
        checkpoint=checkpoint_name(checkpoint),
        layers_per_checkpoint=layers_per_checkpoint,
        compute_dtype=dtype,
        parameter_dtype=parameter_dtype,
    )
    plan.check_dtypes(dtype, parameter_dtype)
    needed = Layout(setting.layout, length, setting.ring).granularity
    if length < needed:
        raise ConfigError(
            f"--length {length}: a {layout} ring of {setting.ring} needs at least {needed}"
        )
    shape = model_shape(model)
    # Refused here once, rather than on each rank.
    if not under_torchrun:
        refuse_local_ranks(shape, setting)
    check_segments(setting.checkpoint, layers_per_checkpoint)
    refuse_route(
        hugging_face_config(shape, length), setting.ring, StepConfig(route=route)
    )
    profiles, is_first = on_ranks(
        profile_rank,
        lambda: (shape, setting, out, say),
        None if under_torchrun else setting.ring,
    )
    if is_first:
        _show(profiles, shape.name, setting, out, as_json)


def _show(
    profiles: "list[RankProfile]",
    name: str,
    setting: "Setting",
    out: Path,
    as_json: bool,
) -> None:
    """Write the report of all ranks, and print its files with each rank's peak and waiting, or all as JSON."""
    from ringspan.report.profile_page import write_report

    title = f"{name}: {setting.length:,} tokens on a ring of {setting.ring}, {setting.compute_dtype}"
    paths = write_report(profiles, out, title)
    if as_json:
        files = [str(path) for path in paths]
        print(
            json.dumps(
                {"ranks": [profile.as_json() for profile in profiles], "files": files}
            )
        )
        return
    for profile in profiles:
        print(
            f"rank {profile.rank}: peak {shown_bytes(profile.peak_bytes)}, step {shown_seconds(profile.step_seconds)}, "
            f"of which {shown_seconds(profile.exposed_seconds)} waiting"
        )
    print(*paths, sep="\n")
