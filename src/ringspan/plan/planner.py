"""Which mesh, layout, route and checkpoint policy a training step should use on a given cluster, and why."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.layout import LayoutName
from ringspan.plan.cost import StepCost, block_tokens_for_overlap, step_cost
from ringspan.plan.hardware import Device, min_block_tokens, min_tokens_per_device
from ringspan.plan.memory import CHECKPOINTS, Memory, Setting, longest, training_memory
from ringspan.plan.shapes import ModelShape

_TIMED_RINGS: Final = 3  # a larger ring only sends more; the smallest that fit are worth comparing


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be trained, and on what. ``batch`` is the sequences of one optimizer step."""

    shape: ModelShape
    device: Device
    devices: int
    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("devices", "length", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: at least 1 is needed")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer: how to run the step, what it needs, and the reasons in words."""

    question: Question
    setting: Setting
    memory: Memory
    cost: StepCost
    max_length_tokens: int
    reasons: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.question.device.memory_bytes

    def as_json(self) -> dict[str, Any]:
        """The object that ``ringspan plan --json`` prints."""
        device, setting = self.question.device, self.setting
        blocks = {
            "intra_node": round(min_block_tokens(device.flops, device.intra_node_bandwidth)),
            "inter_node": round(min_block_tokens(device.flops, device.inter_node_bandwidth)),
        }
        return {
            "fits": self.fits,
            "peak_bytes": self.memory.peak_bytes,
            "bytes": self.memory.bytes,
            "peak_moment": self.memory.moment,
            "mesh": {"replicate": setting.replicate, "ring": setting.ring, "ulysses": 1},
            "layout": setting.layout,
            "route": setting.route,
            "checkpoint": setting.checkpoint,
            "max_length_tokens": self.max_length_tokens,
            "min_block_tokens": blocks,
            "min_tokens_per_device": {link: round(min_tokens_per_device(c)) for link, c in blocks.items()},
            "link_bytes_per_step": {"ring": round(self.cost.ring_bytes), "shards": round(self.cost.shard_bytes)},
            "step_seconds": self.cost.seconds,
            "mfu": self.cost.mfu,
            "tokens_per_second": self.cost.tokens_per_second,
            "flops_per_step": self.cost.flops,
            "reasons": list(self.reasons),
        }


def make_plan(question: Question) -> Plan:
    """The fastest way that fits the devices' memory; the most frugal one when none fits."""
    candidates = list(_fitting(question))
    if candidates:
        timed = [(step_cost(question.shape, c, question.device, question.batch), c) for c in candidates]
        cost, setting = min(timed, key=lambda pair: pair[0].seconds)
    else:
        setting = min(_settings(question), key=lambda each: training_memory(question.shape, each).peak_bytes)
        cost = step_cost(question.shape, setting, question.device, question.batch)
    memory = training_memory(question.shape, setting)
    most = _longest(question)
    return Plan(
        question=question,
        setting=setting,
        memory=memory,
        cost=cost,
        max_length_tokens=most,
        reasons=tuple(_reasons(question, setting, memory, cost, most)),
    )


def _rings(question: Question) -> list[int]:
    """Sizes of a ring that use all devices, small ones first: replicas share the batch evenly, ranks have tokens."""
    devices = question.devices
    divisors = (ring for ring in range(1, devices + 1) if devices % ring == 0)
    rings = [
        ring
        for ring in divisors
        if question.batch % (devices // ring) == 0 and question.length >= _chunks(question, ring)
    ]
    if not rings:
        raise ConfigError(
            f"--batch {question.batch} sequences of {question.length} tokens cannot be shared by {devices} devices: "
            f"a ring of {devices} needs {2 * devices} tokens, replicas need a batch that they divide"
        )
    return rings


def _chunks(question: Question, ring: int) -> int:
    return 2 * ring if _layout(question, ring) == "zigzag" else ring


def _layout(question: Question, ring: int) -> LayoutName:
    """Zigzag balances causal work; contiguous keeps windows between neighbours, and a single rank needs no order."""
    windows = question.shape.layer_windows
    if ring == 1 or all(window is not None and window <= question.length // ring for window in windows):
        return "contiguous"
    return "zigzag"


def _settings(question: Question) -> Iterator[Setting]:
    """Every way to use the devices, small rings and fast policies first."""
    for ring in _rings(question):
        for checkpoint in CHECKPOINTS:
            yield Setting(
                length=question.length,
                ring=ring,
                replicate=question.devices // ring,
                layout=_layout(question, ring),
                checkpoint=checkpoint,
                dtype=question.dtype,
                parameter_dtype=question.parameter_dtype,
            )


def _fitting(question: Question) -> Iterator[Setting]:
    """Of the smallest rings that fit, each with the fastest policy that does."""
    rings: set[int] = set()
    for setting in _settings(question):
        if setting.ring in rings or len(rings) == _TIMED_RINGS:
            continue
        if training_memory(question.shape, setting).peak_bytes <= question.device.memory_bytes:
            rings.add(setting.ring)
            yield setting


def _longest(question: Question, devices: int | None = None) -> int:
    """The longest sequence that fits when one ring takes all devices and layers keep their inputs alone."""
    devices = devices or question.devices
    frugal = Setting(
        length=1,
        ring=devices,
        checkpoint=CHECKPOINTS[-1],
        dtype=question.dtype,
        parameter_dtype=question.parameter_dtype,
    )
    return longest(question.shape, frugal, question.device.memory_bytes)


def _reasons(question: Question, setting: Setting, memory: Memory, cost: StepCost, most: int) -> Iterator[str]:
    shape, device = question.shape, question.device
    if memory.peak_bytes > device.memory_bytes:
        yield from _what_would_fit(question, memory, most)
    else:
        yield from _why_this_ring(question, setting)
        yield from _why_this_policy(question, setting)
    if setting.ring > 1:
        yield _why_this_layout(setting)
    yield f"the peak is in the {memory.moment}: {_gigabytes(memory.peak_bytes)} of {_gigabytes(device.memory_bytes)}"
    yield from _about_links(question, setting, cost)
    if shape.positions and question.length > shape.positions:
        yield f"{shape.name} has {shape.positions:,} learned positions; {question.length:,} tokens need new ones"
    if setting.replicate == 1 and question.batch == 1 and setting.ring > 1:
        yield (
            "for decoding one sequence a ring is the wrong tool: a new token is one query, which no block computation "
            "hides; leave the cache where it is and merge the ranks' partial results"
        )


def _what_would_fit(question: Question, memory: Memory, most: int) -> Iterator[str]:
    shape, device = question.shape, question.device
    short = f"{_gigabytes(memory.peak_bytes)} a device do not fit {_gigabytes(device.memory_bytes)}"
    if most:
        yield f"{short}: on {question.devices} x {device.title} the longest sequence is {most:,} tokens"
    else:
        state = memory.bytes["parameters"] + memory.bytes["optimizer"]
        yield f"{short}: no length fits; parameters and optimizer alone take {_gigabytes(state)} a device"
    devices = question.devices
    while devices < 1 << 16:
        devices *= 2
        if _longest(question, devices) >= question.length:
            yield f"{question.length:,} tokens fit on {devices} x {device.title} in one ring"
            return
    yield f"no number of {device.title} holds {shape.name} with {question.length:,} tokens in this way"


def _why_this_ring(question: Question, setting: Setting) -> Iterator[str]:
    shape, device = question.shape, question.device
    if setting.ring == 1:
        yield "the sequence fits one device: a ring would only add communication"
        return
    if setting.ring == question.devices and setting.replicate == 1 and question.batch == 1:
        alone = replace(setting, ring=1, layout="contiguous", checkpoint=CHECKPOINTS[-1])
        if training_memory(shape, alone).peak_bytes <= device.memory_bytes:
            yield "the sequence would fit one device; the ring only makes it faster, since one sequence has no replicas"
            return
    smaller = [ring for ring in _rings(question) if ring < setting.ring]
    if smaller:
        yield f"a ring of {smaller[-1]} x {question.devices // smaller[-1]} replicas does not fit, or is slower"
    else:
        yield f"{question.batch} sequences on {question.devices} devices leave no smaller ring than {setting.ring}"


def _why_this_layout(setting: Setting) -> str:
    if setting.layout == "zigzag":
        return "zigzag: each rank holds an early and a late chunk, so that causal work is equal on all ranks"
    return "contiguous: windows reach only neighbours, and every rank has the same work"


def _why_this_policy(question: Question, setting: Setting) -> Iterator[str]:
    budget = question.device.memory_bytes
    for faster in CHECKPOINTS[: CHECKPOINTS.index(setting.checkpoint)]:
        need = training_memory(question.shape, replace(setting, checkpoint=faster)).peak_bytes
        if need > budget:
            yield f"checkpoint={faster!r} would need {_gigabytes(need)}"
        else:
            yield f"checkpoint={faster!r} would fit ({_gigabytes(need)}), with a larger ring"


def _about_links(question: Question, setting: Setting, cost: StepCost) -> Iterator[str]:
    device = question.device
    if setting.ring == 1:
        return
    bandwidth = device.bandwidth(setting.ring)
    where = "inside a node" if setting.ring <= device.devices_per_node else "between nodes"
    needed = block_tokens_for_overlap(question.shape, setting, device, bandwidth)
    have = setting.tokens // setting.batch
    if have >= needed:
        yield f"links {where} keep up: {have:,} tokens a rank, {round(needed):,} hide the blocks' travel"
    else:
        yield (
            f"links {where} are too slow for the block: {have:,} tokens a rank, but only {round(needed):,} hide the "
            "blocks' travel; use fewer ranks, or longer sequences"
        )
    if cost.exposed_seconds > 0.05 * cost.seconds:
        yield f"{cost.exposed_seconds / cost.seconds:.0%} of the step waits for links (blocks, parameters, gradients)"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
