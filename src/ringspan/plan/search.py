"""Ways to run a step: meshes, layouts, routes, and what is kept for backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Final

from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.core.errors import ConfigError, LayoutError, UnsupportedError
from ringspan.core.expert_slices import check_slices, num_slices
from ringspan.core.geometry.folds import check_full_folds
from ringspan.core.geometry.layout import Layout
from ringspan.core.names import (
    CHECKPOINT_NAMES,
    CommDtypeName,
    ExpertSlices,
    LayoutName,
)
from ringspan.core.schedule.choice import frugal_segment, other_routes, segment_sizes
from ringspan.core.schedule.route import Route
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cluster.hardware import Device
from ringspan.plan.cost.cost import StepCost, step_cost
from ringspan.plan.cost.memory import ATTENTION_MOMENT, training_memory
from ringspan.plan.cost.passes import Passes, attention_passes
from ringspan.plan.cost.setting import Setting, check_setting
from ringspan.plan.cost.shards import host_use
from ringspan.plan.model.shapes import ModelShape

AUTO: Final = "auto"
# More is a typing error: every divisor of the devices is tried as a ring, and numbers must stay exact.
MOST: Final = {
    "devices": 1 << 20,
    "length": 1 << 40,
    "prompt": 1 << 40,
    "new_tokens": 1 << 40,
    "batch": 1 << 30,
}
FOLDS: Final = (1, 2, 3, 4, 8, 16, 32, 64)  # numbers of folds that are tried


def check_sizes(question: object) -> None:
    """Raise ConfigError for a number of a question that is out of bounds."""
    for name, most in MOST.items():
        if not 1 <= (value := getattr(question, name, 1)) <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: at least 1, and at most {most:,}, is needed"
            )


@dataclass(frozen=True, kw_only=True)
class Question:
    """A step to plan: ``batch`` sequences per optimizer step, ``route`` (or ``auto``), sent as ``comm_dtype``.

    ``folds`` of each sequence; 0: the fewest of ``FOLDS`` that fit.
    """

    shape: ModelShape
    device: Device
    devices: int
    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"
    optimizer_state: str = "float32"
    route: str = AUTO
    comm_dtype: CommDtypeName = "exact"
    folds: int = 1
    expert_slices: ExpertSlices = 1

    def __post_init__(self) -> None:
        check_sizes(self)
        check_slices(self.expert_slices)
        if isinstance(self.expert_slices, int) and self.expert_slices > 1:
            counts = {kind.experts[0] for kind in self.shape.kinds} - {0}
            if not counts:
                raise ConfigError(
                    f"--expert-slices {self.expert_slices}: {self.shape.name} has no experts; leave it out"
                )
            num_slices(self.expert_slices, min(counts), 0)

    def fits(self, setting: Setting) -> bool:
        """Return whether devices (less an allowance for their allocator) and hosts have the memory."""
        if training_memory(self.shape, setting).needed_bytes > self.device.memory_bytes:
            return False
        return self.host_shortage(setting) is None

    def host_shortage(self, setting: Setting) -> tuple[str, int] | None:
        """Return what the host has too little memory for (load or train), with a device's bytes for it, or None."""
        has, use = self.device.host_memory_bytes, host_use(self.shape, setting)
        for what in ("load", "train"):
            if use[what] > has and (has or what == "train"):
                return what, use[what]
        return None

    def limit(self, longest: Setting) -> str:
        """Return "host" or "device": the one without room for one more token per rank."""
        more = replace(
            longest,
            length=longest.length + Layout(longest.layout, 1, longest.ring).granularity,
        )
        return "device" if self.host_shortage(more) is None else "host"

    def step_cost(
        self, setting: Setting, attention: Passes = attention_passes
    ) -> StepCost:
        return step_cost(self.shape, setting, self.device, self.batch, attention)

    def exceeds_on_any_route(self, setting: Setting) -> bool:
        """Return True if no route fits: the host is too small, or the device with a peak outside attention."""
        on_device = training_memory(self.shape, setting)
        if self.host_shortage(setting) is not None:
            return True
        return (
            on_device.needed_bytes > self.device.memory_bytes
            and on_device.moment != ATTENTION_MOMENT
        )


@lru_cache(maxsize=256)
def meshes(question: Question) -> tuple[Setting, ...]:
    """Return a plain setting per valid mesh of all devices, small rings without tensor parallelism first, or raise."""
    found: list[Setting] = []
    refusal: UnsupportedError | LayoutError | None = None
    sizes = [
        tp
        for tp in divisors(question.devices)
        if tp == 1 or question.device.devices_per_node % tp == 0
    ]
    for tp in filter(question.shape.can_split, sizes):
        for ring in divisors(question.devices // tp):
            setting = Setting(
                length=question.length,
                ring=ring,
                replicate=question.devices // tp // ring,
                tp=tp,
                layout=layouts(ring)[0],
                compute_dtype=question.dtype,
                parameter_dtype=question.parameter_dtype,
                optimizer_state=question.optimizer_state,
                comm_dtype=question.comm_dtype,
                folds=question.folds or 1,
                expert_slices=question.expert_slices,
            )
            granularity = Layout(setting.layout, 1, ring).granularity
            if question.batch % setting.replicate or question.length < granularity:
                continue
            try:
                given = replace(
                    setting, route="ring" if question.route == AUTO else question.route
                )
                check_setting(question.shape, given)
                check_full_folds(given.layout, given.length, given.ring, given.folds)
                found.append(given)
            except (UnsupportedError, LayoutError) as error:
                refusal = error if tp == 1 else refusal
    if not found and refusal:
        raise refusal
    if not found:
        raise ConfigError(
            f"--batch {question.batch} sequences of {question.length} tokens cannot be shared by {question.devices} "
            f"devices: a ring of {question.devices} needs {2 * question.devices} tokens, replicas need a batch that "
            "they divide"
        )
    return tuple(found)


def layouts(ring: int) -> tuple[LayoutName, ...]:
    return ("contiguous",) if ring == 1 else ("zigzag", "contiguous")


def routes(question: Question, setting: Setting) -> tuple[str, ...]:
    if question.route != AUTO:
        return (question.route,)
    if question.shape.takes_keys_from_all:
        return ("ring",)
    # Folds do not go with Ulysses groups.
    if setting.ring == 1 or question.folds != 1:
        return ("ring",)
    # pass-q sends queries, and keys in another form do not travel there.
    queries = ("pass-q",) if question.comm_dtype == "exact" else ()
    return ("ring", *_other_routes(question, setting), "bidirectional", *queries)


def _other_routes(question: Question, setting: Setting) -> Iterator[str]:
    """Yield routes other than rings that heads allow, and all-gather between Ulysses groups of one node each."""
    kind = question.shape.split(setting.tp).attention
    sizes = Shape(
        1, kind.heads, kind.kv_heads, kind.head_dim, kind.head_dim, setting.number_bytes
    )
    per_node = max(1, question.device.devices_per_node // setting.tp)
    for route in other_routes(setting.ring, sizes, per_node):
        yield route
        groups, members = (
            setting.ring // Route.parse(route, setting.ring).ulysses,
            setting.ring // per_node,
        )
        if route == f"ulysses:{per_node}" and groups == members > 1:
            yield f"{route}+all-gather"


@lru_cache(maxsize=256)
def policies(question: Question) -> tuple[dict[str, Any], ...]:
    """Return options for what backward keeps, and AdamW's moments, on device or host: from everything to the least."""
    has_host = question.device.host_bandwidth > 0
    hosts = (
        product((False, True), ("none", "activations"))
        if has_host
        else [(False, "none")]
    )
    segments = segment_sizes(question.shape.layers)
    found: list[dict[str, Any]] = []
    for (on_host, offload), checkpoint in product(hosts, CHECKPOINT_NAMES):
        if on_host and question.optimizer_state != "float32":
            continue  # AdamW on the host does not pack moments
        where: dict[str, Any] = {
            "checkpoint": checkpoint,
            "offload": offload,
            "optimizer_on_host": on_host,
        }
        if checkpoint != "none":  # chunks cost nothing, as layers are recomputed anyway
            chosen = [(layers, FREE_CHUNK_TOKENS) for layers in segments]
        else:
            chosen = [
                (1, chunk) for chunk in (0, FREE_CHUNK_TOKENS) if offload == "none"
            ]
        found += [
            where | {"layers_per_checkpoint": n, "feedforward_chunk_tokens": chunk}
            for n, chunk in chosen
        ]
    return tuple(found)


def longest_setting(question: Question, devices: int | None = None) -> Setting | None:
    """Return the ring of all devices that holds the longest sequence, with that length; None if none holds any."""
    if question.folds == 0:
        found = [
            longest_setting(replace(question, folds=folds), devices) for folds in FOLDS
        ]
        return max(
            filter(None, found), key=lambda setting: setting.length, default=None
        )
    devices = devices or question.devices
    # Begin with one token in each chunk.
    asked = replace(
        question, devices=devices, batch=1, length=2 * devices * question.folds
    )
    best, length = None, 0
    segment = frugal_segment(question.shape.layers)
    for mesh in meshes(asked):
        if mesh.replicate > 1:
            continue
        # Policies that hold the longest sequence come first: the others then fail at once.
        for policy in reversed(policies(question)):
            # On the device the most frugal segments hold most; with offloading only recomputed inputs are there.
            # Without checkpoints a short sequence may fit even if chunks and segments, which need some memory, do not.
            is_plain = policy["checkpoint"] == CHECKPOINT_NAMES[0]
            if (
                policy["offload"] == "none"
                and policy["layers_per_checkpoint"] != segment
                and not is_plain
            ):
                continue
            longer = replace(mesh, length=length + 1, **policy)
            if question.exceeds_on_any_route(longer):
                continue
            for route in routes(asked, mesh):
                setting = replace(mesh, route=route, **policy)
                more = longest(setting, question.fits, at_least=length + 1)
                if more:
                    best, length = replace(setting, length=more), more
    return best


def longest(
    setting: Setting, fits: Callable[[Setting], bool], *, at_least: int = 1
) -> int:
    """Return the most tokens of one sequence that fit, a multiple of the layout's granularity; 0 below ``at_least``."""
    step = Layout(setting.layout, 1, setting.ring).granularity
    return step * largest(
        lambda steps: fits(replace(setting, length=steps * step)),
        max(1, -(-at_least // step)),
    )


def largest(holds: Callable[[int], bool], first: int = 1, *, digits: int = 64) -> int:
    """Return the largest number that holds, to about ``digits`` binary digits; 0 if ``first`` does not hold."""
    low, high = 0, first
    while holds(high):
        low, high = high, 2 * high
    while low and high - low > max(1, low >> digits):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
