"""Output of ``ringspan plan``: the answer and how to run it; if asked, cost, reasons, and what to copy."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from ringspan.cli.console import console, facts, heading, paragraph, table
from ringspan.core.messages.units import (
    shown_bandwidth,
    shown_bytes,
    shown_flops,
    shown_seconds,
    shown_speed,
)
from ringspan.plan.documents import LayoutCost
from ringspan.plan.generation.planner import TextPlan, TextQuestion
from ringspan.plan.planner import Plan
from ringspan.plan.reasons import about_positions
from ringspan.plan.rollouts import Rollouts
from ringspan.plan.search import Question
from ringspan.plan.snippet import (
    mesh_call,
    python_call,
    start_command,
    toml_tables,
    train_command,
)


def show(
    answer: Plan,
    result: dict[str, Any],
    mesh: str,
    layouts: Sequence[LayoutCost] = (),
    *,
    explain: bool = True,
) -> None:
    """Print a plan.

    ``result`` is its JSON with any traced memory, ``layouts`` the costs of packed steps, fastest first.
    """
    out = console()
    _verdict(out, answer, result)
    out.print()
    facts(out, "how to run it", list(_settings(answer, result, mesh)))
    if layouts:
        _documents(out, result, layouts)
    if not explain:
        for reason in about_positions(answer.question.shape, answer.question.length):
            paragraph(out, reason)
        paragraph(
            out,
            "--explain: memory, links, reasons, and what to copy. --why-not fsdp: why not plain FSDP.",
        )
        return
    has = shown_bytes(answer.question.device.memory_bytes)
    rows = [
        (name, shown_bytes(num_bytes))
        for name, num_bytes in result["bytes"].items()
        if num_bytes
    ]
    rows += [("peak", f"{shown_bytes(result['peak_bytes'])} of {has}")]
    rows += [("allowance for the allocator", shown_bytes(result["reserve_bytes"]))]
    facts(out, "memory per device at the peak", rows)
    here = min(answer.question.devices, answer.question.device.devices_per_node)
    per_device = [
        (
            f"to {name}",
            shown_bytes(use)
            + (f", {shown_bytes(here * use)} per node" if use and here > 1 else ""),
        )
        for name, use in result["host"].items()
    ]
    facts(out, "memory of the host per device", per_device)
    facts(out, "one step", list(_step(answer)))
    if any(result["link_bytes_per_step"].values()):
        facts(out, "received by each device in one step", list(_received(result)))
    _block(out, answer, result)
    heading(out, "why")
    for reason in result["reasons"]:
        paragraph(out, reason, first="- ")
    _snippets(out, answer, layouts, fits=result["fits"])


def _documents(
    out: Console, result: dict[str, Any], layouts: Sequence[LayoutCost]
) -> None:
    packed = result["documents"]
    lengths = f"{packed['shortest']:,} to {packed['longest']:,} tokens"
    rows = [
        (
            row.layout,
            row.setting.route,
            f"{row.most_work_over_mean:.3f}",
            shown_bytes(row.received_bytes),
            shown_seconds(row.step_seconds),
        )
        for row in layouts
    ]
    headers = "layout", "route", "busiest / mean", "received", "step"
    table(
        out,
        f"a step of {packed['num']:,} packed documents of {lengths}",
        headers,
        rows,
        numbers=3,
    )


def show_rollouts(answer: Plan, result: dict[str, Any], rollouts: Rollouts) -> None:
    """Print what each GPU of the trainer and of the engine holds, and how long weights take from one to the other."""
    out = console()
    out.print()
    facts(out, "with rollouts", list(_rollouts(answer, result, rollouts)))


def _rollouts(
    answer: Plan, result: dict[str, Any], rollouts: Rollouts
) -> Iterator[tuple[str, str]]:
    """Yield a title and a line for the trainer, the engine, its cache, and the hand-over."""
    engine, device = rollouts.engine, answer.question.device
    needs = shown_bytes(result["peak_bytes"] + result["reserve_bytes"])
    has = shown_bytes(device.memory_bytes)
    yield (
        "trainer",
        f"{answer.question.devices:,} x {device.title}, each {needs} of {has}",
    )
    weights = f"{shown_bytes(engine.weight_bytes)} of weights in {engine.dtype}"
    yield "engine", f"{engine.devices:,} x {device.title}, each {weights}"
    sequences = result["rollouts"]["sequences"]
    yield (
        "left for cache",
        f"{shown_bytes(engine.cache_bytes)} each, {engine.cache_tokens:,} tokens in all",
    )
    yield (
        "at once",
        f"{sequences:,} sequence{'s' * (sequences > 1)} of {engine.length:,} tokens",
    )
    where = "inside a node" if rollouts.link == "intra_node" else "between nodes"
    yield "hand-over", f"{_sent(rollouts, rollouts.handed_bytes)} {where}, at least"
    if rollouts.adapter_bytes:
        yield "adapter only", f"{_sent(rollouts, rollouts.adapter_bytes)} {where}"
    stages = f" --pipeline-parallel-size {engine.pipeline}" * (engine.pipeline > 1)
    yield "start it with", f"vllm serve --tensor-parallel-size {engine.tensor}{stages}"


def _sent(rollouts: Rollouts, num_bytes: int) -> str:
    return f"{shown_bytes(num_bytes)} in {shown_seconds(rollouts.seconds(num_bytes))}"


def show_group(
    title: str, ways: dict[str, dict[str, Any]], meshes: dict[str, str]
) -> None:
    """Print the plans of ``compare_group``."""
    rows = [
        (
            {"tree": "one tree", "rows": "separate rows"}[name],
            f"{meshes[name]}, {way['layout']}, {way['route']}, checkpoint {way['checkpoint']}",
            f"{way['tokens']:,}",
            f"{way['pairs']:.3g}",
            shown_bytes(way["peak_bytes"] + way["reserve_bytes"])
            + ("" if way["fits"] else ", too much"),
            "" if way["step_seconds"] is None else shown_seconds(way["step_seconds"]),
        )
        for name, way in ways.items()
    ]
    table(
        console(),
        title,
        ("as", "how", "tokens", "pairs", "per device", "step"),
        rows,
        numbers=4,
    )


def _verdict(out: Console, answer: Plan, result: dict[str, Any]) -> None:
    """Print whether the plan fits and what would make it fit, a step's time and limit, and the longest sequence."""
    question, device = answer.question, answer.question.device
    needs, has, where = (
        result["peak_bytes"] + result["reserve_bytes"],
        device.memory_bytes,
        "at the peak",
    )
    if not result["fits"] and needs <= has:
        what, needs = question.host_shortage(answer.setting) or (
            "train",
            result["host_bytes"],
        )
        has, where = device.host_memory_bytes, f"in the host's memory to {what}"
    verb, change = (
        "of" if result["fits"] else "needed, more than the",
        result["smallest_change"],
    )
    need = f"{shown_bytes(needs)} {verb} {shown_bytes(has)} per device {where}"
    if change:
        where = "" if where == "at the peak" else f" {where}"
        need = f"needs {shown_bytes(needs)} of {shown_bytes(has)}{where}"
        need += f"; with {change['option']} {shown_bytes(change['peak_bytes'])}"
    _fits(out, need, fits=result["fits"])
    cost = answer.cost
    links = cost.exposed_seconds / cost.seconds
    limit = (
        "memory"
        if not result["fits"]
        else "the host, launch-bound"
        if cost.is_launch_bound
        else f"links, {links:.0%} of it"
        if links > 0.05
        else "computing"
    )
    paragraph(
        out,
        f"a step: {shown_seconds(cost.seconds)}, {_throughput(answer)}, {cost.mfu:.1%} MFU; limit: {limit}",
    )
    longest = "longest sequence that fits: "
    if result["max_length_tokens"]:
        longest += (
            f"{result['max_length_tokens']:,} tokens ({result['max_length_needs']})"
        )
    else:
        longest += "none, the model's own state is too large"
    paragraph(out, longest)
    sequences = f"{question.batch:,} sequence{'s' * (question.batch > 1)} of {question.length:,} tokens"
    _asked(out, question, f"{sequences} per step")


def _fits(out: Console, need: str, *, fits: bool) -> None:
    verdict = (
        Text("fits: yes", style="bold green")
        if fits
        else Text("fits: no", style="bold red")
    )
    out.print(verdict + Text(f", {need}", style="not bold"), soft_wrap=True)


def _asked(out: Console, question: Question | TextQuestion, work: str) -> None:
    billions, title = question.shape.parameters / 1e9, question.device.title
    parameters = (
        f"{billions:.3g}B parameters"
        if billions > 0.1
        else f"{1e3 * billions:.3g}M parameters"
    )
    paragraph(
        out,
        f"asked: {question.shape.name} ({parameters}), {work}, on {question.devices:,} x {title}",
    )


def _settings(
    answer: Plan, result: dict[str, Any], mesh: str
) -> Iterator[tuple[str, str]]:
    """Yield the chosen settings as (name, text): mesh, batches, route, and only such memory options as are in use."""
    yield "mesh", mesh
    yield (
        "micro-batches",
        f"{result['micro_steps']:,} of {result['micro_batch']:,} per replica and step",
    )
    yield "layout, route", f"{result['layout']}, {result['route']}"
    if result["comm_dtype"] != "exact":
        yield "keys and values", f"sent as {result['comm_dtype']}"
    if result["folds"] > 1:
        yield (
            "folds",
            f"{result['folds']:,} of {answer.setting.fold.tokens:,} tokens per rank",
        )
    yield "checkpoint", result["checkpoint"]
    if result["layers_per_checkpoint"] > 1:
        yield "layers per checkpoint", str(result["layers_per_checkpoint"])
    if result["feedforward_chunk_tokens"]:
        yield (
            "feed-forward",
            f"in chunks of {result['feedforward_chunk_tokens']:,} tokens",
        )
    if any(kind.experts[0] for kind in answer.question.shape.kinds):
        yield "layer", _gathered_layer(answer, result)
    if result["host_bytes"]:
        what = ["activations"] * (result["offload"] != "none") + [
            "AdamW's moments"
        ] * result["optimizer_on_host"]
        yield (
            "on the host",
            f"{shown_bytes(result['host_bytes'])} of {' and '.join(what)} per device",
        )


def _gathered_layer(answer: Plan, result: dict[str, Any]) -> str:
    """Return a layer's bytes once gathered, and the slices of its experts."""
    shape, setting = answer.question.shape, answer.setting
    slices = max(setting.slices_of(kind) for kind in shape.kinds)
    in_slices = f" at a time, experts in {slices} slices" if slices > 1 else ""
    return f"{shown_bytes(result['layer_gather_bytes'])} gathered{in_slices}"


def _step(answer: Plan) -> Iterator[tuple[str, str]]:
    cost = answer.cost
    yield (
        "time",
        f"{shown_seconds(cost.seconds)}, of which {shown_seconds(cost.exposed_seconds)} wait for links",
    )
    yield (
        "computing",
        f"{shown_flops(cost.flops)} in all, {cost.mfu:.1%} of the devices' data sheets (MFU)",
    )
    yield "throughput", _throughput(answer)


def _throughput(answer: Plan) -> str:
    speed = answer.cost.tokens_per_second
    return f"{speed:,.0f} tokens/s" if speed >= 100 else f"{speed:.3g} tokens/s"


def _received(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    link = result["link_bytes_per_step"]
    parts = {
        "ring": "for attention",
        "shards": "parameters and gradients",
        "tensor_sums": "sums over tp",
    }
    for name, label in (parts | {"host": "to and from the host"}).items():
        if link[name]:
            yield label, shown_bytes(link[name])
    inside, between = shown_bytes(link["intra_node"]), shown_bytes(link["inter_node"])
    yield "over links", f"{inside} inside a node, {between} between nodes"


def _block(out: Console, answer: Plan, result: dict[str, Any]) -> None:
    if answer.setting.ring == 1:
        return
    device, blocks = answer.question.device, result["min_block_tokens"]
    heading(out, "smallest block whose transfer is hidden")
    inside, between = device.intra_node_bandwidth, device.inter_node_bandwidth
    for line in (
        f"{blocks['intra_node']:,} tokens inside a node ({shown_bandwidth(inside)}), {blocks['inter_node']:,} between "
        f"nodes ({shown_bandwidth(between)})",
        f"the Ring Attention paper's c >= F / B: F FLOP/s of the device ({shown_speed(device.flops)}), B bytes per "
        "second of a link; full attention at that speed, without grouped heads, which need fewer tokens",
    ):
        paragraph(out, line, first="  ")


def _snippets(
    out: Console, answer: Plan, layouts: Sequence[LayoutCost], *, fits: bool
) -> None:
    """Print tables for run.toml, the start command and the Python call, if there is a setting that fits.

    If the plan itself does not fit, they are for the longest sequence that does.
    """
    question, setting = answer.question, answer.setting if fits else answer.longest
    if fits and layouts:
        setting = replace(layouts[0].setting, layout=layouts[0].layout)  # pyright: ignore[reportArgumentType]
    if setting is None:
        return
    if question.device.name.startswith("tpu"):
        out.print()
        paragraph(
            out,
            "ringspan train and parallelize run on PyTorch, not on a TPU; for JAX see docs/jax.md.",
        )
        return
    length = "" if fits else f" the {setting.length:,} tokens that fit"
    for title, text in (
        (
            f"to train{length}, add this to run.toml, after [model] and [data]:",
            toml_tables(question, setting),
        ),
        (
            "and start:",
            train_command(question, setting, "run.toml", documents=bool(layouts)),
        ),
        ("or in Python:", python_call(setting)),
    ):
        out.print()
        paragraph(out, title, style="bold")
        out.print(Text(text), soft_wrap=True)


def show_text(answer: TextPlan, model: str) -> None:
    """Print a plan of generation: whether it fits, the longest prompt, mesh, memory, times, reasons and the command."""
    out, question, cost = console(), answer.question, answer.cost
    has = shown_bytes(question.device.memory_bytes)
    _text_verdict(out, answer, has)
    out.print()
    facts(out, "how to run it", list(_text_settings(answer)))
    parts = {
        "weights": cost.weight_bytes,
        "cache": cost.cache_bytes,
        "a chunk of the prompt": cost.work_bytes,
    }
    rows = [(name, shown_bytes(num_bytes)) for name, num_bytes in parts.items()]
    facts(
        out,
        "memory per device at the peak",
        [*rows, ("peak", f"{shown_bytes(cost.peak_bytes)} of {has}")],
    )
    facts(out, "time, at least", list(_text_times(answer)))
    heading(out, "why")
    for reason in answer.reasons():
        paragraph(out, reason, first="- ")
    if (
        answer.fits
        and not answer.is_refused
        and not question.device.name.startswith("tpu")
    ):
        out.print()
        paragraph(out, "to generate:", style="bold")
        out.print(
            Text(
                _text_command(answer, model)
                if question.batch == 1
                else _text_call(answer)
            ),
            soft_wrap=True,
        )


def _text_verdict(out: Console, answer: TextPlan, has: str) -> None:
    """Print whether a plan of generation fits into what a device has, the longest prompt, and what was asked."""
    question, cost = answer.question, answer.cost
    verb = "of" if answer.fits else "needed, more than the"
    _fits(
        out,
        f"{shown_bytes(cost.peak_bytes)} {verb} {has} per device at the peak",
        fits=answer.fits,
    )
    longest = (
        f"{answer.max_prompt:,} tokens"
        if answer.max_prompt
        else "none, the weights are too large"
    )
    paragraph(out, f"longest prompt that fits: {longest}")
    if answer.is_refused:
        asked = question.prompt + question.new_tokens
        paragraph(
            out,
            f"too long: {asked:,} tokens, the model has {answer.positions:,} positions",
            style="bold red",
        )
    prompts = f"{question.batch:,} prompt{'s' * (question.batch > 1)} of {question.prompt:,} tokens"
    _asked(out, question, f"{prompts} and {question.new_tokens:,} new ones each")
    if answer.alone_is_better and question.devices > 1:
        paragraph(out, "one device would be the better choice", style="bold")


def _text_settings(answer: TextPlan) -> Iterator[tuple[str, str]]:
    """Yield the chosen settings as (name, text): mesh, and on a ring the weights of each rank."""
    text, devices = answer.text, answer.question.devices
    mesh = {"replicate": text.replicate, "ring": text.ring, "tp": text.tp}
    axes = " x ".join(
        f"{name} {size}" for name, size in mesh.items() if name == "ring" or size > 1
    )
    used = "" if text.devices == devices else f", {text.devices} of {devices} devices"
    yield "mesh", f"{axes}{used}"
    if text.ring > 1:
        yield "weights", f"{text.weights} on the ranks of a ring"


def _text_times(answer: TextPlan) -> Iterator[tuple[str, str]]:
    cost, alone = answer.cost, answer.alone
    yield "to the first token", shown_seconds(cost.first_token_seconds)
    yield "per token after it", shown_seconds(cost.token_seconds)
    yield "in all", shown_seconds(cost.seconds)
    if answer.text.devices > 1:
        fits = "" if answer.alone_fits else ", if it held it"
        first, each = (
            shown_seconds(alone.first_token_seconds),
            shown_seconds(alone.token_seconds),
        )
        yield "on one device", f"{first}, then {each} per token{fits}"


def _text_command(answer: TextPlan, model: str) -> str:
    question, text = answer.question, answer.text
    command = f"ringspan generate {model} --prompt-file prompt.txt"
    start = start_command(
        command, text.ring * text.tp, question.device.devices_per_node
    )
    options = f" --tp {text.tp}" if text.tp > 1 else ""
    options += f" --max-new-tokens {question.new_tokens} --dtype {text.dtype}"
    return (
        f"{start}{options}{' --weights sharded' if text.weights == 'sharded' else ''}"
    )


def _text_call(answer: TextPlan) -> str:
    text = answer.text
    note = (
        f"  # {text.batch:,} of the prompts on each replica"
        if text.replicate > 1
        else ""
    )
    options = f'max_new_tokens={answer.question.new_tokens}, weights="{text.weights}"'
    lines = f"mesh = {mesh_call(text)}", "model = rs.parallelize(model.eval(), mesh)"
    return "\n".join((*lines, f"text = model.generate(ids, {options}){note}"))
