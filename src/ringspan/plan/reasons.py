"""Reasons for a plan, in words about its numbers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.messages.units import shown_bytes, shown_seconds
from ringspan.core.names import CHECKPOINT_NAMES
from ringspan.plan.cost.cost import StepCost, block_tokens_for_overlap
from ringspan.plan.cost.folds import most_waiting, per_token
from ringspan.plan.cost.kept import pixel_bytes, seen_bytes
from ringspan.plan.cost.memory import (
    RESERVE,
    Memory,
    gathered_layer_bytes,
    training_memory,
)
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import host_bytes, host_use
from ringspan.plan.cost.states import state_bytes
from ringspan.plan.model.shapes import ModelShape
from ringspan.plan.search import AUTO, Question, longest_setting, meshes

_LAYOUTS: Final = {
    "zigzag": "each rank holds an early and a late chunk, so that causal work is equal on all ranks",
    "contiguous": "the fewest bytes travel, which counts for more than equal work on all ranks",
    "striped": "causal work is equal on all ranks, hop by hop",
}


def needs(setting: Setting) -> str:
    """Return the options of a setting that differ from the plainest run, as one line of text."""
    parts = [
        f"ring {setting.ring}",
        f"tp {setting.tp}" if setting.tp > 1 else "",
        f"route {setting.route}",
    ]
    parts += [f"checkpoint {setting.checkpoint}"]
    if setting.folds > 1:
        parts.append(f"{setting.folds} folds")
    if setting.layers_per_checkpoint > 1:
        parts.append(f"{setting.layers_per_checkpoint} layers per checkpoint")
    if setting.feedforward_tokens:
        parts.append(f"feed-forward in chunks of {setting.feedforward_tokens}")
    if setting.expert_slices != 1:
        parts.append(
            f"experts in {setting.expert_slices} slices"
            if setting.expert_slices != "auto"
            else "experts in slices"
        )
    if setting.offload != "none":
        parts.append("activations on the host")
    if setting.optimizer_on_host:
        parts.append("moments on the host")
    return ", ".join(part for part in parts if part)


def why(
    question: Question,
    setting: Setting,
    memory: Memory,
    cost: StepCost,
    longest: Setting | None,
) -> Iterator[str]:
    """Yield sentences on mesh, route, micro-batch and policy (or on what would fit), the peak and the links."""
    shape, device = question.shape, question.device
    if not question.fits(setting):
        yield from _what_would_fit(question, setting, memory, longest)
    else:
        yield from _why_this_ring(question, setting)
        yield from _why_this_route(question, setting, cost)
        yield from _why_this_split(question, setting, cost)
        yield from _why_this_micro_batch(question, setting, cost)
        yield from _why_this_policy(question, setting)
    if setting.ring > 1:
        yield f"{setting.layout}: {_LAYOUTS[setting.layout]}"
    yield (
        f"the peak is in the {memory.moment}: {shown_bytes(memory.peak_bytes)} of {shown_bytes(device.memory_bytes)}; "
        f"{shown_bytes(memory.reserve_bytes)} more, {RESERVE:.0%} of activations, temporaries and communication, are "
        "an allowance for what the allocator reserves with expandable segments (ringspan train sets them; one H200 "
        "reserved 32% without)"
    )
    yield from _about_experts(question, setting)
    yield from _about_host(question, setting)
    yield from _about_folds(question, setting, cost, longest)
    yield from _about_states(question, setting)
    yield from _about_towers(question, setting)
    yield from _about_links(question, setting, cost)
    yield from about_positions(shape, question.length)
    if device.note:
        yield device.note


def about_positions(shape: ModelShape, length: int) -> Iterator[str]:
    if shape.positions and length > shape.positions:
        yield f"{shape.name} has {shape.positions:,} learned positions; {length:,} tokens need new ones"
    elif shape.made_for and length > shape.made_for:
        yield (
            f"{shape.name} was made for {shape.made_for:,} positions: for {length:,} tokens, scale its rotary "
            "positions (ringspan train: model.rope; transformers: config.rope_parameters)"
        )


def _what_would_fit(
    question: Question, setting: Setting, memory: Memory, longest: Setting | None
) -> Iterator[str]:
    """Yield whether device or host is too small, the longest sequence that fits, and the devices needed."""
    shape, device = question.shape, question.device
    short = f"{shown_bytes(memory.needed_bytes)} a device do not fit {shown_bytes(device.memory_bytes)}"
    if memory.needed_bytes <= device.memory_bytes:
        what, host = question.host_shortage(setting) or ("train", 0)
        short = (
            f"to {what} it, {shown_bytes(host)} a device do not fit its {shown_bytes(device.host_memory_bytes)} of "
            f"the host{' (one weight or layer)' if what == 'load' else ''}"
        )
    if longest:
        yield (
            f"{short}: on {question.devices} x {device.title} the longest sequence is {longest.length:,} tokens "
            f"({needs(longest)})"
        )
    else:
        state = memory.bytes["parameters"] + memory.bytes["optimizer"]
        yield f"{short}: no length fits; parameters and optimizer alone take {shown_bytes(state)} a device"
    if question.expert_slices == 1 and large_experts(question):
        sliced = longest_setting(replace(question, expert_slices="auto"))
        if sliced and sliced.length > (longest.length if longest else 0):
            yield (
                f"with --expert-slices auto the longest sequence is {sliced.length:,} tokens ({needs(sliced)})"
            )
    devices = question.devices
    while devices < 1 << 14:
        devices *= 2
        try:
            enough = longest_setting(question, devices)
        except UnsupportedError:  # the given route needs more heads
            break
        if enough and enough.length >= question.length:
            yield f"{question.length:,} tokens fit on {devices} x {device.title} in one ring ({needs(enough)})"
            return
    yield f"no number of {device.title} holds {shape.name} with {question.length:,} tokens in this way"


def large_experts(question: Question) -> bool:
    """Return True if ``auto`` would gather a layer's experts in slices."""
    alone = replace(meshes(question)[0], expert_slices="auto")
    return any(alone.slices_of(kind) > 1 for kind in question.shape.kinds)


def _about_experts(question: Question, setting: Setting) -> Iterator[str]:
    """Yield what a layer's gathered weights take with experts, and with these in slices."""
    kinds = [kind for kind in question.shape.split(setting.tp).kinds if kind.experts[0]]
    if not kinds:
        return
    kind = max(kinds, key=lambda each: each.experts[1])
    whole = setting.number_bytes * kind.experts[1]
    slices = setting.slices_of(kind)
    if slices > 1:
        part = setting.number_bytes * setting.slice_of(kind)
        yield (
            f"a layer's experts, {shown_bytes(whole)}, are gathered in {slices} slices: two of {shown_bytes(part)} and "
            "one's gradients are in memory at a time"
        )
        return
    layer = shown_bytes(gathered_layer_bytes(question.shape, setting))
    others = replace(setting, expert_slices="auto").slices_of(kind)
    proposal = f"; --expert-slices auto would hold two of {others} slices" * (
        others > 1
    )
    yield (
        f"a layer is gathered whole: {layer}, of which its {kind.experts[0]} experts are {shown_bytes(whole)}, twice "
        f"with the next layer, and once more as gradients{proposal}"
    )


def _why_this_ring(question: Question, setting: Setting) -> Iterator[str]:
    """Yield why the ring is not smaller: memory, speed, or a batch with too few sequences for replicas."""
    shape, device = question.shape, question.device
    if setting.ring == 1:
        yield "the sequence fits one device: a ring would only add communication"
        return
    if setting.ring * setting.tp == question.devices and question.batch == 1:
        alone = replace(
            setting,
            ring=1,
            route="ring",
            layout="contiguous",
            checkpoint=CHECKPOINT_NAMES[-1],
        )
        if training_memory(shape, alone).needed_bytes <= device.memory_bytes:
            yield "the sequence would fit one device; the ring only makes it faster, since one sequence has no replicas"
            return
    smaller = [
        mesh
        for mesh in meshes(question)
        if mesh.tp == setting.tp and mesh.ring < setting.ring
    ]
    if smaller:
        yield f"a ring of {smaller[-1].ring} x {smaller[-1].replicate} replicas does not fit, or is slower"
    else:
        sequences = f"{question.batch} sequence{'s' * (question.batch > 1)}"
        yield f"a batch of {sequences} on {question.devices} devices leaves no smaller ring than {setting.ring}"


def _why_this_route(
    question: Question, setting: Setting, cost: StepCost
) -> Iterator[str]:
    """Yield the route's time per step next to the plain ring's."""
    if setting.ring == 1:
        return
    shape, device = question.shape, question.device
    if setting.route == "ring":
        if question.route == AUTO:
            yield "route ring: no other route or mesh that fits is predicted to save three percent of a step"
        return
    chosen = "as asked" if question.route != AUTO else "the quickest that fits"
    around = replace(setting, route="ring")
    try:
        other = question.step_cost(around).busy_seconds
    except UnsupportedError as error:
        yield f"route {setting.route}, {chosen}: {error}"
        return
    need = training_memory(shape, around).needed_bytes
    verb = (
        "would take"
        if need <= device.memory_bytes
        else f"would need {shown_bytes(need)} and take"
    )
    yield (
        f"route {setting.route}, {chosen}: {shown_seconds(cost.busy_seconds)} per step, around the ring it {verb} "
        f"{shown_seconds(other)}"
    )


def _why_this_split(
    question: Question, setting: Setting, cost: StepCost
) -> Iterator[str]:
    """Yield what tensor parallelism costs and saves, or why it was not considered."""
    shape = question.shape
    if shape.unsplit and question.devices > 1:
        yield f"no tensor parallelism was weighed: {shape.unsplit}"
    if setting.tp == 1:
        return
    sums = cost.tensor_bytes / question.device.bandwidth(setting.tp)
    merged = [
        mesh
        for mesh in meshes(question)
        if mesh.tp == 1 and mesh.ring == setting.ring * setting.tp
    ]
    without = ""
    for mesh in merged[:1]:
        other = replace(setting, tp=1, ring=mesh.ring, route="ring")
        need, seconds = (
            training_memory(shape, other).peak_bytes,
            question.step_cost(other).seconds,
        )
        without = f"; a ring of {mesh.ring} without it would need {shown_bytes(need)} and take {shown_seconds(seconds)}"
    yield (
        f"tp {setting.tp}: heads, feed-forward and vocabulary are split over neighbours of a node, whose sums take "
        f"{shown_seconds(sums)} of a step{without}"
    )


def _why_this_micro_batch(
    question: Question, setting: Setting, cost: StepCost
) -> Iterator[str]:
    if setting.batch > 1:
        one = question.step_cost(replace(setting, batch=1))
        yield (
            f"{setting.batch} sequences per micro-step, for which parameters are gathered once: with one a step would "
            f"take {shown_seconds(one.seconds)}, not {shown_seconds(cost.seconds)}"
        )


def _why_this_policy(question: Question, setting: Setting) -> Iterator[str]:
    """Yield what each faster checkpoint policy, and each option that saves memory, would need instead."""
    budget, shape = question.device.memory_bytes, question.shape
    for faster in CHECKPOINT_NAMES[: CHECKPOINT_NAMES.index(setting.checkpoint)]:
        kept = (
            {} if faster != "none" else {"offload": "none", "layers_per_checkpoint": 1}
        )
        need = training_memory(
            shape, replace(setting, checkpoint=faster, **kept)
        ).needed_bytes
        if need > budget:
            yield f"checkpoint={faster!r} would need {shown_bytes(need)}"
        else:
            yield f"checkpoint={faster!r} would fit ({shown_bytes(need)}), but is slower there, or with its host"

    def without(**changes: object) -> str:
        return f"would need {shown_bytes(training_memory(shape, replace(setting, **changes)).needed_bytes)}"

    if (layers := setting.layers_per_checkpoint) > 1:
        need = without(layers_per_checkpoint=1)
        yield f"{layers} layers per checkpoint, the inputs of all but the first made again: with one they {need}"
    if setting.feedforward_tokens and setting.checkpoint == "none":
        need = without(feedforward_chunk_tokens=0)
        yield f"feed-forward in chunks of {setting.feedforward_tokens} tokens: all at once {need}"
    if setting.offload != "none":
        need, there = without(offload="none"), shown_bytes(host_bytes(shape, setting))
        yield f"activations wait on the host, {there} a device in all: on the device they {need}"
    if setting.optimizer_on_host:
        need = without(optimizer_on_host=False)
        yield f"AdamW's moments are on the host and step there: on the device they {need}"


def _about_host(question: Question, setting: Setting) -> Iterator[str]:
    """Yield a warning if a host of known memory can train but not write a checkpoint."""
    has, use = question.device.host_memory_bytes, host_use(question.shape, setting)
    if has and use["save"] > has >= use["train"]:
        yield (
            f"the host cannot hold a checkpoint while it is written: {shown_bytes(use['save'])} a device with the copy "
            f"of its shards, of {shown_bytes(has)}; use more devices, or another place for what is on the host"
        )


def _about_states(question: Question, setting: Setting) -> Iterator[str]:
    """Yield the bytes that layers with states and convolutions send, and the kernels that their cost assumes."""
    shape = question.shape
    kinds = [kind for kind in shape.kinds if kind.scan or kind.halo]
    pools = any(kind.index and kind.index.window for kind in shape.kinds)
    if (
        setting.checkpoint == "none"
        and shape.streams > 1
        and (pools or any(kind.scan for kind in kinds))
    ):
        yield (
            "without checkpoints, layers with states or pooled entries, whose hidden states are in several streams, "
            "keep more than is counted (on two ranks a small Qwen4-exp 44%, in PyTorch code, a DeepSeek-V4 4%): leave "
            "room, or use checkpoints"
        )
    if not kinds:
        return
    if setting.ring > 1:
        split = Layout(setting.layout, setting.length, setting.ring)
        sent = sum(
            max(state_bytes(split, kind, setting.number_bytes)) for kind in kinds
        )
        yield (
            f"{len(kinds)} of {shape.layers} layers have states or convolutions: a rank sends {shown_bytes(sent)} per "
            "sequence and step for them, at any length"
        )
    if any(kind.scan for kind in kinds):
        yield (
            "states are counted as in fused kernels (flash-linear-attention, mamba-ssm); transformers' PyTorch code, "
            "which runs without them, holds more and takes longer"
        )


def _about_towers(question: Question, setting: Setting) -> Iterator[str]:
    """Yield the tokens that images, frames and sound take, and the bytes that towers keep."""
    shape = question.shape
    if not shape.sees:
        return
    if not shape.towers:
        yield (
            f"{shape.name} has towers, which rest without --images, --frames or --sound; their "
            f"{sum(shape.tower_layers) + shape.tower_root:,} parameters are counted"
        )
        return
    names = {
        "image": "images",
        "video": "frames, or pairs of them that a tower joins",
        "audio": "windows of sound",
    }
    for tower in shape.towers:
        yield (
            f"{tower.units:,} {names[tower.modality]} make {tower.tokens:,} of {question.length:,} tokens; a rank's "
            f"tower takes {tower.share(setting.batch, setting.ring):,} of {setting.batch * tower.units:,}"
        )
    yield (
        f"towers keep {shown_bytes(seen_bytes(shape, setting))} a device until the end of backward; all pixels, "
        f"{shown_bytes(pixel_bytes(shape, setting))}, are in the host's memory on every rank"
    )
    if shape.later_pairs:
        yield "attention is timed as causal, without what the tokens of an image see of its later ones"


def _about_links(question: Question, setting: Setting, cost: StepCost) -> Iterator[str]:
    """Yield whether computing with a block hides sending it, and the share of a step that waits for links."""
    device = question.device
    if not question.shape.layer_masks:  # nothing attends, no block travels
        return
    if setting.ring > 1 and setting.route == "ring":
        span = setting.ring * setting.tp
        where = "inside a node" if span <= device.devices_per_node else "between nodes"
        needed = block_tokens_for_overlap(
            question.shape, setting, device, device.bandwidth(span)
        )
        have = setting.tokens // setting.batch
        said, only, remedy = "keep up", "and", ""
        if have < needed:
            said, only = "are too slow for the block", "but only"
            remedy = "; use fewer ranks, or longer sequences"
        yield (
            f"links {where} {said}: {have:,} tokens per rank, {only} from {round(needed):,} on computing with a block "
            f"takes longer than sending it{remedy}"
        )
    share = cost.exposed_seconds / cost.seconds
    if cost.is_launch_bound:
        yield (
            f"launch-bound: the hosts take {shown_seconds(cost.launch_seconds)} to launch all layers, the devices "
            f"{shown_seconds(cost.busy_seconds)} to compute them; more tokens per rank cost nothing until then"
        )
    if share > 0.05:
        yield f"{share:.0%} of the step waits for links (blocks, parameters, gradients, sums)"


def _about_folds(
    question: Question, setting: Setting, cost: StepCost, longest: Setting | None
) -> Iterator[str]:
    """Yield the bytes that wait between folds, the time of their copies, and the limit on the length."""
    if setting.folds == 1:
        return
    local, where = (
        question.shape.split(setting.tp),
        "device" if setting.offload == "none" else "host",
    )
    each = per_token(local.counted(local.layers), setting)
    yield (
        f"between folds, up to {shown_bytes(most_waiting(local, setting))} a device wait on the {where}: "
        f"{shown_bytes(round(each.keys))} a token of keys and values, and as many of their gradients, or float32 sums "
        f"where several folds have seen them; copies take {shown_seconds(cost.host_seconds)} beside "
        f"{shown_seconds(cost.compute_seconds)} of computing, weights {shown_seconds(cost.gather_seconds)}"
    )
    if longest:
        yield f"longer than {longest.length:,} tokens does not fit the {question.limit(longest)}'s memory"
