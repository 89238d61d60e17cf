"""Choice of mesh, layout, route and checkpoint policy for a training step, with reasons."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from typing import Any, Final

from ringspan.core.errors import ConfigError, RingspanError
from ringspan.core.names import CHECKPOINT_NAMES
from ringspan.core.schedule.choice import WORTH_IT
from ringspan.plan.cluster.hardware import min_block_tokens, min_tokens_per_device
from ringspan.plan.cost.cost import StepCost
from ringspan.plan.cost.kept import pixel_bytes, seen_bytes
from ringspan.plan.cost.memory import (
    Memory,
    gathered_layer_bytes,
    training_memory,
)
from ringspan.plan.cost.passes import even_passes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import host_bytes, host_use
from ringspan.plan.reasons import large_experts, needs, why
from ringspan.plan.search import (
    FOLDS,
    Question,
    layouts,
    longest_setting,
    meshes,
    policies,
    routes,
)

# A larger ring only sends more, so only the smallest that fit, with the optimizer on the device, are timed.
_TIMED_RINGS: Final = 3
_RANK: Final = 16  # rank of the adapters proposed if training all weights does not fit


@dataclass(frozen=True, kw_only=True)
class Plan:
    question: Question
    setting: Setting
    memory: Memory
    cost: StepCost
    longest: Setting | None
    reasons: tuple[str, ...]
    change: tuple[str, int] | None = None
    """The first change of one option that makes it fit, and the peak bytes then; None if it fits, or none helps."""

    @property
    def fits(self) -> bool:
        return self.question.fits(self.setting)

    @property
    def max_length_tokens(self) -> int:
        return self.longest.length if self.longest else 0

    def as_json(self) -> dict[str, Any]:
        """Return the plan as ``ringspan plan --json`` prints it: options, bytes at the peak, link bytes, seconds."""
        device, setting = self.question.device, self.setting
        links = {
            "intra_node": device.intra_node_bandwidth,
            "inter_node": device.inter_node_bandwidth,
        }
        blocks = {
            link: round(min_block_tokens(device.flops, bandwidth))
            for link, bandwidth in links.items()
        }
        return {
            "fits": self.fits,
            "peak_bytes": self.memory.peak_bytes,
            "reserve_bytes": self.memory.reserve_bytes,
            "bytes": self.memory.bytes,
            "peak_moment": self.memory.moment,
            "mesh": _fields(setting, "replicate", "ring")
            | {"ulysses": setting.way.ulysses, "tp": setting.tp},
            "micro_batch": setting.batch,
            "micro_steps": setting.micro_steps(self.question.batch),
            **_fields(
                setting,
                "folds",
                "expert_slices",
                "layout",
                "route",
                "comm_dtype",
                "checkpoint",
                "layers_per_checkpoint",
            ),
            "feedforward_chunk_tokens": setting.feedforward_tokens,
            "layer_gather_bytes": gathered_layer_bytes(self.question.shape, setting),
            **_fields(setting, "offload", "optimizer_on_host", "optimizer_state"),
            "host_bytes": host_bytes(self.question.shape, setting),
            "host": host_use(self.question.shape, setting),
            "smallest_change": {"option": self.change[0], "peak_bytes": self.change[1]}
            if self.change
            else None,
            "max_length_tokens": self.max_length_tokens,
            "max_length_needs": needs(self.longest) if self.longest else "",
            "max_length_limit": self.question.limit(self.longest)
            if self.longest
            else "",
            "min_block_tokens": blocks,
            "min_tokens_per_device": {
                link: round(min_tokens_per_device(c)) for link, c in blocks.items()
            },
            "link_bytes_per_step": {
                {"shard": "shards", "tensor": "tensor_sums"}.get(name, name): round(
                    getattr(self.cost, f"{name}_bytes")
                )
                for name in (
                    "ring",
                    "shard",
                    "tensor",
                    "intra_node",
                    "inter_node",
                    "host",
                )
            },
            "step_seconds": self.cost.seconds,
            "seconds": self.cost.parts,
            **_fields(self.cost, "mfu", "tokens_per_second"),
            "flops_per_step": self.cost.flops,
            "reasons": list(self.reasons),
            **self._towers(),
        }

    def _towers(self) -> dict[str, Any]:
        shape, setting = self.question.shape, self.setting
        if not shape.sees:
            return {}
        rows = [
            _fields(tower, "modality", "units", "tokens")
            | {
                "units_per_rank": tower.share(setting.batch, setting.ring),
                "flops": tower.units * tower.flops.at(1),
            }
            for tower in shape.towers
        ]
        return {
            "towers": {
                "parameters": sum(shape.tower_layers) + shape.tower_root,
                "saved_bytes": seen_bytes(shape, setting),
                "pixel_bytes_on_host": pixel_bytes(shape, setting),
                "inputs": rows,
            }
        }


def _fields(each: object, *names: str) -> dict[str, Any]:
    return {name: getattr(each, name) for name in names}


def make_plan(question: Question) -> Plan:
    """Return the fastest setting that fits the memory, else the most frugal; raise if no mesh or route exists."""
    shape = question.shape
    if shape.placed_tokens > question.length:
        options = ", ".join(
            f"{tower.units:,} of {tower.modality}" for tower in shape.towers
        )
        raise ConfigError(
            f"--length {question.length}: what it holds ({options}) makes {shape.placed_tokens:,} tokens alone; give "
            "more, or fewer or smaller images"
        )
    fastest = _fastest(question)
    longest = longest_setting(question)
    if longest and longest.length < shape.placed_tokens:  # too short for the images
        longest = None
    folds = question.folds or (longest.folds if longest else 1)
    setting = fastest or min(
        _settings(replace(question, folds=folds)), key=partial(_shortage, question)
    )
    memory, cost = training_memory(question.shape, setting), question.step_cost(setting)
    return Plan(
        question=question,
        setting=setting,
        memory=memory,
        cost=cost,
        longest=longest,
        reasons=tuple(why(question, setting, memory, cost, longest)),
        change=None if fastest else _smallest_change(question, longest),
    )


def _smallest_change(
    question: Question, longest: Setting | None
) -> tuple[str, int] | None:
    """Return the first option with which a question fits, and its peak bytes: dtype, devices, adapters, shorter."""
    counts = [times * question.devices for times in (2, 4, 8)]
    twice, *more = [(f"--devices {count}", {"devices": count}) for count in counts]
    tried: list[tuple[str, dict[str, Any]]] = []
    if question.expert_slices == 1 and large_experts(question):
        tried.append(("--expert-slices auto", {"expert_slices": "auto"}))
    tried += [
        ("--parameter-dtype bfloat16", {"parameter_dtype": "bfloat16"}),
        twice,
    ]
    if not question.shape.lora and not question.shape.sees:
        tried.append((f"--lora {_RANK}", {"shape": question.shape.adapted(_RANK)}))
    if question.folds == 1 and question.device.host_bandwidth:
        tried.append(("--folds 0", {"folds": 0}))
    tried += more
    # A shorter sequence is tried before more devices if at least half of the length remains.
    if longest:
        at = (
            tried.index(twice) + 2
            if 2 * longest.length >= question.length
            else len(tried)
        )
        tried.insert(at, (f"--length {longest.length}", {"length": longest.length}))
    for option, change in tried:
        try:
            other = replace(question, **change)
            setting = _fastest(other)
        except RingspanError:  # no mesh has this number of devices, or this few tokens
            continue
        if setting is not None:
            return option.replace("folds 0", f"folds {setting.folds}"), training_memory(
                other.shape, setting
            ).peak_bytes
    return None


def _shortage(question: Question, setting: Setting) -> tuple[int, int]:
    on_device = training_memory(question.shape, setting).needed_bytes
    on_host = question.host_shortage(setting)
    return max(on_device, question.device.memory_bytes), on_host[1] if on_host else 0


def weighed_seconds(setting: Setting, cost: StepCost) -> float:
    """Return a step's seconds plus 3% per gain that only a time model promises: routes, tp, micro-batches, host."""
    others = (
        setting.route != "ring",
        setting.tp > 1,
        setting.batch > 1,
        setting.offload != "none",
    )
    return cost.busy_seconds / WORTH_IT ** (sum(others) + setting.optimizer_on_host)


def _settings(question: Question) -> Iterator[Setting]:
    for mesh in meshes(question):
        for route in routes(question, mesh):
            for policy in policies(question):
                yield replace(mesh, route=route, **policy)


class _Race:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._seconds = math.inf
        self.fastest: Setting | None = None

    def time(self, setting: Setting) -> StepCost:
        cost = self._question.step_cost(setting)
        seconds = weighed_seconds(setting, cost)
        if seconds < self._seconds:
            self._seconds, self.fastest = seconds, setting
        return cost

    def is_lost(self, setting: Setting) -> bool:
        """Return True if the setting is not faster even with even attention and nothing sent for it."""
        return (
            weighed_seconds(setting, self._question.step_cost(setting, even_passes))
            >= self._seconds
        )


def _fastest(question: Question) -> Setting | None:
    """Return the smallest rings' fastest fitting policy per tp; other routes if the ring waits or has windows."""
    if question.folds == 0:
        return next(
            filter(None, (_fastest(replace(question, folds=folds)) for folds in FOLDS)),
            None,
        )
    race = _Race(question)
    rings: dict[int, set[int]] = {}
    others: list[Setting] = []
    for mesh in meshes(question):
        known = rings.setdefault(mesh.tp, set())
        if len(known) < _TIMED_RINGS and not _is_hopeless(question, mesh):
            fits, beside = _time_mesh(race, question, mesh)
            others += beside
            if fits:
                known.add(mesh.ring)
    # These come last, as a good time to beat rules out most of them.
    for way in others:
        if not race.is_lost(replace(way, **policies(question)[0])):
            for setting in _fastest_policies(question, way):
                race.time(setting)
    return race.fastest


def _time_mesh(
    race: _Race, question: Question, mesh: Setting
) -> tuple[bool, list[Setting]]:
    """Time the first route that fits; return whether it does so without host moments, and what else to try."""
    named = product(routes(question, mesh), layouts(mesh.ring))
    ways = [replace(mesh, route=route, layout=layout) for route, layout in named]
    has_windows = not all(mask.sees_all for mask in question.shape.layer_masks)
    for way in [way for way in ways if way.layout == mesh.layout]:
        ways.remove(way)
        timed = {
            setting: race.time(setting) for setting in _fastest_policies(question, way)
        }
        setting = next(
            (setting for setting in timed if not setting.optimizer_on_host), None
        )
        if setting is None:
            continue
        waits = timed[setting].compute_seconds < WORTH_IT * timed[setting].seconds
        for larger in _larger_micro_batches(question, setting) if waits else ():
            race.time(larger)
        return True, ways if waits or has_windows else []
    return False, ways if has_windows else []


def _is_hopeless(question: Question, mesh: Setting) -> bool:
    """Return whether no policy fits on any route; the most frugal ones are asked first."""
    return all(
        question.exceeds_on_any_route(replace(mesh, **policy))
        for policy in reversed(policies(question))
    )


def _larger_micro_batches(question: Question, setting: Setting) -> Iterator[Setting]:
    """Yield settings with 2, 4, ... times the sequences per micro-step, which share one gather and reduction."""
    for policy in policies(question):
        larger = replace(setting, batch=2, **policy)
        if larger.uses_host:
            break  # all that follow use the host
        while question.batch % (larger.replicate * larger.batch) == 0:
            if not question.fits(larger):
                break
            yield larger
            larger = replace(larger, batch=2 * larger.batch)
        else:
            return  # all sizes fit, and keeping less is no faster


def _fastest_policies(question: Question, setting: Setting) -> Iterator[Setting]:
    """Yield, for each use of the host that may be faster, the policies up to the first without segments that fits."""
    for _, group in groupby(
        policies(question),
        lambda policy: (policy["offload"], policy["optimizer_on_host"]),
    ):
        candidates = list(group)
        frugal = replace(setting, **candidates[-1])
        if frugal.offload == "none" and not question.fits(frugal):
            continue  # the group's other policies keep more
        for policy in candidates:
            tried = replace(setting, **policy)
            if not question.fits(tried):
                continue
            yield tried
            if tried.layers_per_checkpoint == 1:
                if not tried.uses_host and tried.checkpoint != CHECKPOINT_NAMES[-1]:
                    return  # offloading would not be faster
                break
