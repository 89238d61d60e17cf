"""``ringspan plan``: does it fit, how to run it and how fast it will be, before anything runs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringspan.cli.checks import AsJson, check_picture
from ringspan.cli.console import console
from ringspan.core.errors import ConfigError
from ringspan.core.messages.extras import require
from ringspan.core.messages.units import shown_bytes
from ringspan.plan.model.configs import MODELS

if TYPE_CHECKING:
    from ringspan.core.names import ExpertSlices
    from ringspan.plan.cluster.devices import Device as Accelerator
    from ringspan.plan.documents import LayoutCost
    from ringspan.plan.generation.planner import TextPlan
    from ringspan.plan.model.media import Media
    from ringspan.plan.model.shapes import ModelShape
    from ringspan.plan.planner import Plan
    from ringspan.plan.rollouts import Rollouts
    from ringspan.plan.search import Question

EPILOG = (
    "Examples: ringspan plan --model llama-3.1-8b --devices 8 --device h100 --length 1048576. "
    "ringspan plan --model qwen3-32b --devices 16 --device h100 --length 32768 --rollouts 8. "
    "ringspan plan --generate --model llama-3.1-8b --devices 8 --device h100 --prompt 130000 --new-tokens 500"
)
DEFAULT_PROMPT, DEFAULT_NEW_TOKENS = 100_000, 200


Model = Annotated[
    str,
    typer.Option(
        help=f"A config.json or its folder, a Hugging Face id, or one of these: {', '.join(MODELS)}."
    ),
]
Devices = Annotated[int, typer.Option(min=1, help="Number of accelerators.")]
Device = Annotated[
    str,
    typer.Option(
        help="Kind of accelerator: h100, b200, mi300x, v5p, ..., or numbers: flops=...,memory_bytes=..."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of machines; default: as this kind is usually built."
    ),
]
Length = Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")]
Batch = Annotated[
    int, typer.Option(min=1, help="Sequences per optimizer step, on all devices.")
]
BatchOrPrompts = Annotated[
    int,
    typer.Option(
        min=1, help="Sequences per optimizer step on all devices, or prompts at once."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Dtype of computing (model.dtype): bfloat16 or float32.")
]
ParameterDtype = Annotated[
    str,
    typer.Option(
        help="Dtype of parameters, gradients and moments (model.parameter_dtype): float32 or bfloat16."
    ),
]
Route = Annotated[
    str,
    typer.Option(
        help="auto, or ring, bidirectional, double-ring:I, all-gather, pass-q, ulysses, ulysses:U, ulysses:U+ROUTE."
    ),
]
CommDtype = Annotated[
    str,
    typer.Option(
        help="Dtype of keys and values in messages: exact, bfloat16, float8 or int8."
    ),
]


# Options that only a training step has: refused in a comparison of groups, and in generation.
_OF_SEQUENCES = (
    "length", "folds", "images", "frames", "sound", "documents", "trace", "rank", "picture", "why_not", "explain",
    "rollouts",
)  # fmt: skip
_OF_TRAINING = (
    *_OF_SEQUENCES, "parameter_dtype", "optimizer_state", "route", "comm_dtype", "lora", "weights", "group",
    "completion", "expert_slices",
)  # fmt: skip


def command(
    context: typer.Context,
    model: Model = "llama-3.1-8b",
    devices: Devices = 8,
    device: Device = "h100-80gb",
    nodes: Nodes = None,
    length: Length = 131_072,
    batch: BatchOrPrompts = 1,
    dtype: Dtype = "bfloat16",
    parameter_dtype: ParameterDtype = "float32",
    route: Route = "auto",
    comm_dtype: CommDtype = "exact",
    folds: Annotated[
        int,
        typer.Option(
            min=0, help="Parts of a sequence, computed in turn; 0: as many as it takes."
        ),
    ] = 1,
    expert_slices: Annotated[
        str,
        typer.Option(
            help="Parts that a layer's experts are gathered in: a number, or auto, the fewest of 2 GiB at most."
        ),
    ] = "1",
    lora: Annotated[
        int,
        typer.Option(
            min=0, help="Train adapters of this rank on all linear layers; 0: none."
        ),
    ] = 0,
    weights: Annotated[
        str,
        typer.Option(
            help="With --lora: pack the frozen weights: int8, int4, nf4, nf4-double."
        ),
    ] = "",
    optimizer_state: Annotated[
        str,
        typer.Option(
            help="Pack AdamW's moments, as optimizer.state does: float32 (not packed), 8bit or 4bit."
        ),
    ] = "float32",
    images: Annotated[
        str | None,
        typer.Option(help="Images per sequence: a number, or 8x448x448 (with size)."),
    ] = None,
    frames: Annotated[
        str | None, typer.Option(help="Frames of video per sequence, in the same form.")
    ] = None,
    sound: Annotated[
        int | None, typer.Option(min=1, help="Windows of sound per sequence.")
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option(
            help="Compare layouts for packed documents: a .json list of lengths, or lognormal:MEDIAN[,SIGMA]."
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Get the memory from the real step on fake tensors."
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The rank to trace; default: 0.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the traced memory, or work per rank of --documents: .png, .svg or .pdf."
        ),
    ] = None,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Plan generation for --batch prompts instead."),
    ] = False,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --generate or --group: prompt tokens; default: 100000."
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: new tokens; default: 200."),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Compare so many answers to --prompt tokens as a tree with separate rows.",
        ),
    ] = None,
    completion: Annotated[
        int | None, typer.Option(min=1, help="With --group: tokens of each answer.")
    ] = None,
    rollouts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also plan an inference engine on so many more devices: what they hold, and how long weights take to "
            "it.",
        ),
    ] = None,
    why_not: Annotated[
        str | None,
        typer.Option(
            help="Print why the plan is not this: fsdp (whole sequences per device), or a --route."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also print memory, links, reasons, and the tables and call to copy.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a training step: does it fit, how long does it take, what limits it, and how to run it.

    Models known by name take less than a second and need no framework. Any other model that runs on a ring
    (docs/models.md, column "plan") is read from its config by running one layer of each kind without memory.
    --trace traces the real step as one of its ranks. --group compares answers to one prompt as a tree of segments with
    separate rows (docs/shared-prefixes.md). --generate plans generation: whether weights and cache fit, on
    which mesh, and the time to the first and to each later token.
    """
    if generate:
        _refuse_given(context, _OF_TRAINING, "generate")
        text = planned_text(
            model,
            device,
            devices,
            nodes,
            batch=batch,
            dtype=dtype,
            prompt=prompt or DEFAULT_PROMPT,
            new_tokens=new_tokens or DEFAULT_NEW_TOKENS,
        )
        _show_text(text, model, as_json=as_json)
        return
    if group:
        _refuse_given(context, _OF_SEQUENCES, "group")
    from ringspan.core.names import find_name
    from ringspan.plan.cost.shards import MOMENT_BYTES
    from ringspan.plan.documents import read_documents
    from ringspan.plan.model.media import read_media

    _check_prompts(group, completion, prompt, new_tokens)
    if picture:
        _check_drawing(picture, trace=trace, documents=documents)
    if trace and optimizer_state != "float32":
        raise ConfigError(
            f"--optimizer-state {optimizer_state}: --trace runs PyTorch's AdamW; leave one out"
        )
    lengths = read_documents(documents, length) if documents is not None else ()
    traced_rank = _traced_rank(rank, trace=trace)
    media = read_media(images, frames, sound)
    question = question_of(
        model,
        device,
        devices,
        nodes,
        media,
        lora,
        weights,
        length=length,
        batch=batch,
        dtype=dtype,
        parameter_dtype=parameter_dtype,
        route=route,
        comm_dtype=comm_dtype,
        folds=folds,
        expert_slices=_slices(expert_slices),
        optimizer_state=find_name(
            "--optimizer-state", optimizer_state, tuple(MOMENT_BYTES), ConfigError
        ),
    )
    if group and completion:
        _compare_group(
            question, group, prompt or DEFAULT_PROMPT, completion, as_json=as_json
        )
        return
    wanted = _Wanted(
        documents=documents or "",
        lengths=lengths,
        traced_rank=traced_rank,
        picture=picture,
        rollouts=rollouts,
        why_not=why_not,
        explain=explain,
        as_json=as_json,
    )
    _answer(question, wanted)


def _slices(text: str) -> "ExpertSlices":
    """Read --expert-slices; ConfigError for what is neither a number nor auto."""
    if text == "auto":
        return "auto"
    if not (text.isdecimal() and int(text) > 0):
        raise ConfigError(
            f"--expert-slices {text}: use a number of slices, such as 4, or auto"
        )
    return int(text)


def _refuse_given(context: typer.Context, others: tuple[str, ...], mode: str) -> None:
    """Raise ConfigError for the first of other modes' options that is given with this mode."""
    for name in others:
        source = getattr(context.get_parameter_source(name), "name", "")
        if source == "COMMANDLINE":
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} is for a training step of its own; leave it out, or --{mode}"
            )


def _check_prompts(
    group: int | None,
    completion: int | None,
    prompt: int | None,
    new_tokens: int | None,
) -> None:
    """Raise ConfigError for options of prompts that planning a training step, or a group, leaves unused."""
    if (group is None) != (completion is None):
        raise ConfigError(
            "--group and --completion say together how many answers of how many tokens; give both"
        )
    for name, value in (
        ("prompt", None if group else prompt),
        ("new-tokens", new_tokens),
    ):
        if value is not None:
            raise ConfigError(f"--{name} {value} is for generation; add --generate")


def _check_drawing(picture: Path, *, trace: bool, documents: str | None) -> None:
    """Raise ConfigError unless there is one thing to draw, and a file and matplotlib to draw it."""
    if trace == (documents is not None):
        raise ConfigError(
            f"--picture {picture} draws a trace, or documents; add --trace or --documents"
        )
    check_picture(picture, ".png", ".svg", ".pdf")
    require(f"--picture {picture}", "matplotlib")


def _traced_rank(rank: int | None, *, trace: bool) -> int | None:
    """Return the rank that a trace plays, or None without a trace; raise ConfigError for a rank without one."""
    if trace:
        return rank or 0
    if rank is not None:
        raise ConfigError(f"--rank {rank} is the rank that a trace plays; add --trace")
    return None


def _show_text(answer: "TextPlan", model: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer.as_json()))
        return
    from ringspan.cli.plan_tables import show_text

    show_text(answer, model)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Answers that are wanted in addition to a step's plan, and their form."""

    documents: str
    lengths: tuple[int, ...]
    """Lengths of the documents; none without documents."""
    traced_rank: int | None
    picture: Path | None
    rollouts: int | None
    """Devices of an inference engine, in addition to the trainer's."""
    why_not: str | None
    explain: bool
    as_json: bool


def _answer(question: "Question", wanted: _Wanted) -> None:
    """Plan a step, add all that is wanted, and print it."""
    from ringspan.plan.planner import make_plan

    beside = _beside(question, wanted.rollouts)
    answer = make_plan(question)
    result = answer.as_json()
    if wanted.traced_rank is not None:
        result |= _traced(answer, wanted.traced_rank, quiet=wanted.as_json)
    layouts = _layouts(answer, wanted) if wanted.lengths else []
    if layouts:
        result["documents"] = {
            "num": len(wanted.lengths),
            "shortest": min(wanted.lengths),
            "longest": max(wanted.lengths),
            "layouts": [row.as_json() for row in layouts],
        }
    if wanted.picture and wanted.traced_rank is not None:
        _draw(answer, result, wanted.picture)
    elif wanted.picture and layouts:
        _draw_documents(answer, layouts[0], wanted.lengths, wanted.picture)
    if wanted.why_not:
        from ringspan.plan.alternatives import why_not as alternative

        result["why_not"] = asdict(alternative(answer, wanted.why_not))
    if beside:
        result["rollouts"] = beside.as_json()
    if wanted.as_json:
        print(json.dumps(result))
        return
    from ringspan.cli.plan_tables import show, show_rollouts

    if wanted.why_not:
        print(*result["why_not"]["lines"], sep="\n")
    else:
        show(answer, result, shown_mesh(result), layouts, explain=wanted.explain)
    if beside:
        show_rollouts(answer, result, beside)


def _beside(question: "Question", rollouts: int | None) -> "Rollouts | None":
    from ringspan.plan.rollouts import plan_rollouts

    return plan_rollouts(question, rollouts) if rollouts else None


def _compare_group(
    question: "Question", group: int, prompt: int, completion: int, *, as_json: bool
) -> None:
    from ringspan.cli.plan_tables import show_group
    from ringspan.plan.group import compare_group

    ways = compare_group(question, group, prompt, completion)
    if as_json:
        print(
            json.dumps(
                {"group": group, "prompt": prompt, "completion": completion} | ways
            )
        )
    else:
        title = f"{group} answers of {completion:,} tokens to each prompt of {prompt:,}: {question.shape.name}"
        meshes = {name: shown_mesh(way) for name, way in ways.items()}
        show_group(
            f"{title}, {question.devices:,} x {question.device.title}", ways, meshes
        )


def _layouts(answer: "Plan", wanted: _Wanted) -> "list[LayoutCost]":
    """Time documents on each layout; raise ConfigError for a plan whose step cannot be timed with them."""
    from ringspan.plan.documents import compare_layouts

    if answer.setting.folds > 1:
        raise ConfigError(
            f"--documents {wanted.documents} are not timed in --folds {answer.question.folds}; leave one out"
        )
    if not answer.fits:
        raise ConfigError(
            f"--documents {wanted.documents}: the step does not fit, so no layout is timed; see it without them"
        )
    with console(stderr=True, quiet=wanted.as_json).status(
        f"timing {len(wanted.lengths):,} documents on each layout"
    ):
        return compare_layouts(answer.question, answer.setting, wanted.lengths)


def check_dtypes(dtype: str, parameter_dtype: str = "float32") -> None:
    from ringspan.core.names import find_name

    for option, name in (("--dtype", dtype), ("--parameter-dtype", parameter_dtype)):
        if name == "float16":
            raise ConfigError(
                f"{option} float16 overflows without loss scaling, which is not done; use bfloat16"
            )
        find_name(option, name, ("float32", "bfloat16"), ConfigError)


def question_of(
    model: str, device: str, devices: int, nodes: int | None, media: "Media | None" = None, lora: int = 0,
    weights: str = "", *, dtype: str, parameter_dtype: str, comm_dtype: str, **asked: Any,
) -> "Question":  # fmt: skip
    from ringspan.core.names import COMM_DTYPE_NAMES, find_name
    from ringspan.plan.model.configs import model_shape
    from ringspan.plan.search import Question

    check_dtypes(dtype, parameter_dtype)
    return Question(
        device=_kind(device, devices, nodes),
        shape=_adapted(model_shape(model, media or {}, dtype), lora, weights),
        devices=devices,
        dtype=dtype,
        parameter_dtype=parameter_dtype,
        comm_dtype=find_name("--comm-dtype", comm_dtype, COMM_DTYPE_NAMES, ConfigError),
        **asked,
    )


def _adapted(shape: "ModelShape", lora: int, weights: str) -> "ModelShape":
    """Return a model with adapters, if asked; raise ConfigError for packed weights without, or unknown ones."""
    from ringspan.core.names import find_name
    from ringspan.plan.model.shapes import PACKED_BYTES

    if weights:
        find_name("--weights", weights, tuple(PACKED_BYTES)[1:], ConfigError)
        if not lora:
            raise ConfigError(
                f"--weights {weights} freezes the weights; add --lora 16 to train adapters"
            )
    return shape.adapted(lora, weights) if lora else shape


def planned_text(
    model: str,
    device: str,
    devices: int,
    nodes: int | None,
    *,
    dtype: str,
    **asked: int,
) -> "TextPlan":
    from ringspan.plan.generation.planner import TextQuestion, plan_text
    from ringspan.plan.model.configs import model_shape

    check_dtypes(dtype)
    kind = _kind(device, devices, nodes)
    return plan_text(
        TextQuestion(
            device=kind, shape=model_shape(model), devices=devices, dtype=dtype, **asked
        )
    )


def _kind(name: str, devices: int, nodes: int | None) -> "Accelerator":
    from dataclasses import replace

    from ringspan.plan.cluster import hardware

    kind = hardware.device(name)
    if nodes is None:
        return kind
    if devices % nodes:
        raise ConfigError(
            f"--nodes {nodes} do not share {devices} devices evenly; choose a divisor"
        )
    return replace(kind, devices_per_node=devices // nodes)


def _traced(answer: "Plan", rank: int, *, quiet: bool) -> dict[str, Any]:
    from ringspan.measure.trace.dry_run import summary, trace_plan

    with console(stderr=True, quiet=quiet).status(
        "tracing the training step on fake tensors"
    ):
        return summary(trace_plan(answer, rank), answer.question.device.memory_bytes)


def _draw(answer: "Plan", result: dict[str, Any], picture: Path) -> None:
    from ringspan.report.profile_page import trace_picture

    question = answer.question
    title = (
        f"{question.shape.name}, {question.length:,} tokens, rank {result['rank']} of {question.devices} x "
        f"{question.device.title}: {shown_mesh(result)}, peak {shown_bytes(result['peak_bytes'])}"
    )
    trace_picture(result["timeline"], question.device.memory_bytes, title, picture)


def _draw_documents(
    answer: "Plan", fastest: "LayoutCost", lengths: tuple[int, ...], picture: Path
) -> None:
    from ringspan.core.geometry.balanced import batch_layout
    from ringspan.core.geometry.mask import documents
    from ringspan.report.ring_pictures import ring_picture

    question = answer.question
    split = batch_layout(fastest.layout, question.length, fastest.setting.ring, lengths)
    heading = f"{fastest.layout} layout, {len(lengths):,} documents"
    ring_picture(split, documents(lengths), heading).savefig(picture, dpi=144)


def shown_mesh(result: dict[str, Any]) -> str:
    """Format a plan's mesh; Ulysses groups are inside the ring, and the route names them."""
    axes = {
        name: size
        for name, size in result["mesh"].items()
        if name in ("replicate", "ring") or size > 1
    }
    axes.pop("ulysses", None)
    return " x ".join(f"{name} {size}" for name, size in axes.items())
