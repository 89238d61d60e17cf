"""Reasons why a plan did not choose another route, or plain FSDP."""

from dataclasses import dataclass, replace
from typing import Final

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.units import shown_bytes, shown_seconds
from ringspan.core.schedule.choice import WORTH_IT
from ringspan.plan.cost.cost import step_cost
from ringspan.plan.cost.memory import training_memory
from ringspan.plan.cost.setting import Setting
from ringspan.plan.planner import Plan, make_plan
from ringspan.plan.reasons import needs
from ringspan.plan.search import longest, policies

FSDP: Final = "fsdp"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Reason against ``asked``: chosen, better (than the plan), heads, memory or time; None if no mesh allows it."""

    asked: str
    reason: str
    lines: tuple[str, ...]
    peak_bytes: int | None = None
    step_seconds: float | None = None


def why_not(plan: Plan, asked: str) -> Alternative:
    """Return why ``plan`` is not ``asked``: a route, or ``fsdp`` (whole sequences); UnsupportedError for another."""
    if asked == FSDP:
        return _fsdp(plan)
    question, setting = plan.question, plan.setting
    try:
        other = make_plan(replace(question, route=asked))
    except UnsupportedError as error:
        if "unknown route" in str(error):
            raise UnsupportedError(f"--why-not {asked}: {error}, or {FSDP}") from None
        return Alternative(asked=asked, reason="heads", lines=(f"{asked}: {error}",))
    cost, needed = other.cost, other.memory.needed_bytes
    faster = 1 - cost.seconds / plan.cost.seconds
    if setting.ring == 1:
        reason, first = (
            "time",
            "the plan keeps each sequence on one device, where attention sends nothing",
        )
    elif other.setting == setting:
        reason, first = "chosen", "the plan chose it"
    elif not other.fits:
        reason, first = (
            "memory",
            f"does not fit, and the plan {'does' if plan.fits else 'does not either'}",
        )
    elif faster > 1 - WORTH_IT:
        reason, first = (
            "better",
            f"{faster:.1%} faster than the plan: choose it with --route {asked}",
        )
    elif faster > 0:
        least = f"less than {1 - WORTH_IT:.0%} does not decide against a plain ring"
        reason, first = "time", f"{faster:.1%} faster; {least}"
    else:
        reason, first = "time", f"{-faster:.1%} slower"
    lines = [f"{asked}: {first}"]
    for name, each in dict(
        [(asked, other), ("the plan", plan)][reason == "chosen" :]
    ).items():
        lines.append(
            f"{name}: {shown_seconds(each.cost.seconds)} a step, {shown_seconds(each.cost.exposed_seconds)} of it for "
            f"links; {shown_bytes(round(each.cost.ring_bytes))} received for attention and "
            f"{shown_bytes(each.memory.needed_bytes)} of memory per device ({needs(each.setting)})"
        )
    return Alternative(
        asked=asked,
        reason=reason,
        lines=tuple(lines),
        peak_bytes=needed,
        step_seconds=cost.seconds,
    )


def _fsdp(plan: Plan) -> Alternative:
    """Compare with FSDP over all devices; a ring's buffers, counted too, make its memory a little too high."""
    question, shape, num = plan.question, plan.question.shape, plan.question.devices
    plain = Setting(
        length=num * question.length,
        ring=num,
        layout="contiguous",
        compute_dtype=question.dtype,
        parameter_dtype=question.parameter_dtype,
        optimizer_state=question.optimizer_state,
    )
    ways = [replace(plain, **policy) for policy in policies(question)]
    least = min(ways, key=lambda way: training_memory(shape, way).needed_bytes)
    way = next(filter(question.fits, ways), least)
    needed = training_memory(shape, way).needed_bytes
    computing = step_cost(
        shape, replace(way, length=question.length, ring=1), question.device, 1
    ).seconds
    gathering = step_cost(
        shape, way, question.device, 1
    ).shard_bytes / question.device.bandwidth(num)
    seconds = -(-question.batch // num) * max(computing, gathering)
    idle = (
        f"; {question.batch:,} of {num:,} devices have a sequence"
        if question.batch < num
        else ""
    )
    if question.fits(way):
        reason = "better" if seconds < plan.cost.seconds or not plan.fits else "time"
        first = (
            "fits, and is the better choice"
            if reason == "better"
            else "fits, and is not faster"
        )
    else:
        reason, first = (
            "memory",
            f"does not fit; at most {longest(least, question.fits) // num:,} tokens do",
        )
    lines = (
        f"{FSDP}, whole sequences on each device: {first}",
        f"{FSDP}: {shown_seconds(seconds)} a step, at least{idle}; {shown_bytes(needed)} of memory per device, "
        f"about (checkpoint {way.checkpoint})",
        f"the plan: {shown_seconds(plan.cost.seconds)} a step; {shown_bytes(plan.memory.needed_bytes)} of memory per "
        f"device ({needs(plan.setting)})",
    )
    return Alternative(
        asked=FSDP, reason=reason, lines=lines, peak_bytes=needed, step_seconds=seconds
    )
