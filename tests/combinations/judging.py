"""Whether a draw is on a ring what it is on one process, and what is left of a draw that is not."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tests.combinations.runs import (
    STEPS,
    Found,
    Refused,
    on_one_process,
    on_ring,
    prepare,
)
from tests.combinations.tables import (
    TABLES,
    Draw,
    Family,
    line_of,
    refusals_of,
    settled,
    value,
)
from tests.pool import Pool
from tests.torch.models import relative

# Relative, in narrower dtypes than float64. A ring adds partial sums in another order than one process, whose own
# distance from float64 says how much rounding makes of a draw: three times that, and where it is next to nothing by
# chance some ten units of the last place. bfloat16 computes layers alone; the weights stay float32.
_TIMES: Final = 3
_LEAST: Final[dict[str, float]] = {"float32": 1e-5, "bfloat16": 2e-2}
_OTHER_MESH: Final = {
    "ring 2": "2 replicas", "2 replicas": "ring 2", "ring 4": "2 replicas of ring 2", "2 replicas of ring 2": "ring 4",
}  # fmt: skip


class Outcome(NamedTuple):
    kind: str  # equal, refused, differs, refused without a rule, not refused, crashed, hung, not on one process
    said: str
    errors: dict[str, float]

    @property
    def is_right(self) -> bool:
        return self.kind in ("equal", "refused")


def judge(pool: Pool, draw: Draw) -> Outcome:
    """Run a draw on a ring and on one process, and compare."""
    then = _resumed(draw)
    with tempfile.TemporaryDirectory(prefix="ringspan-draw-") as folder:
        prepare(draw, Path(folder))
        try:
            outcomes = _on_ring(pool, draw, then, Path(folder))
        except TimeoutError as error:
            return Outcome("hung", str(error), {})
        except RuntimeError as error:  # of a rank that died
            return Outcome("crashed", str(error), {})
        crashes = [
            outcome for outcome in outcomes if isinstance(outcome, BaseException)
        ]
        if crashes:
            pool.restart()
            first = min(crashes, key=_is_of_exchange)
            notes = "\n".join(getattr(first, "__notes__", []))
            return Outcome("crashed", f"{type(first).__name__}: {first}\n{notes}", {})
        if refused := [outcome for outcome in outcomes if isinstance(outcome, Refused)]:
            return _judge_refusal(draw, outcomes, refused)
        if expected := refusals_of(draw):
            return Outcome("not refused", f"should say {expected[0]!r}", {})
        return _compare(draw, then, Path(folder), outcomes)


def _is_of_exchange(error: BaseException) -> bool:
    """Whether a rank failed because another one did."""
    return "gloo/" in str(error)


def _on_ring(pool: Pool, draw: Draw, then: Draw, folder: Path) -> list[Any]:
    """What each rank found, or raised."""
    if not draw["between"].startswith("resume"):
        return _asked(pool, draw, folder, range(STEPS))
    first = _asked(pool, draw, folder, range(1))
    if not all(isinstance(each, Found) for each in first):
        return first
    second = _asked(pool, then, folder, range(1, STEPS))
    if not all(isinstance(each, Found) for each in second):
        return second
    return [one.followed_by(two) for one, two in zip(first, second, strict=True)]


def _asked(pool: Pool, draw: Draw, folder: Path, steps: range) -> list[Any]:
    sizes = value(draw, "mesh")
    return pool.outcomes(
        on_ring,
        sizes.ranks,
        draw,
        folder,
        steps,
        replicate=sizes.replicate,
        tp=sizes.tp,
    )


def _resumed(draw: Draw) -> Draw:
    """The draw that the second step is of."""
    return draw | (
        {"mesh": _OTHER_MESH[draw["mesh"]]}
        if draw["between"] == "resume on another mesh"
        else {}
    )


def _judge_refusal(draw: Draw, outcomes: list[Any], refused: list[Refused]) -> Outcome:
    said = f"{refused[0].kind}: {refused[0].message}"
    if len(refused) < len(outcomes) or len({each[:2] for each in refused}) > 1:
        return Outcome("crashed", f"the ranks differ: {outcomes}"[:2000], {})
    if any(each.posts for each in refused):
        return Outcome(
            "crashed", f"refused after {refused[0].posts} exchanges: {said}", {}
        )
    if any(message in said for message in refusals_of(draw)):
        return Outcome("refused", said, {})
    return Outcome("refused without a rule", said, {})


def _compare(draw: Draw, then: Draw, folder: Path, outcomes: list[Found]) -> Outcome:
    is_packed = draw["trains"] == "QLoRA"  # bitsandbytes computes in float32 at most
    wide = torch.float32 if is_packed else torch.float64
    try:
        truth = on_one_process(draw, then, folder, wide)
    except Exception as error:  # of the model's own code
        return Outcome("not on one process", f"{type(error).__name__}: {error}", {})
    each = [_errors(draw, found, truth) for found in outcomes]
    worst = {name: max(errors[name] for errors in each) for name in each[0]}
    bounds: dict[str, float]
    if is_packed:
        bounds = dict.fromkeys(worst, _TIMES * _LEAST["float32"])
    elif draw["dtype"] in _LEAST:
        alone = _errors(
            draw,
            on_one_process(draw, then, folder, getattr(torch, draw["dtype"])),
            truth,
        )
        bounds = {
            name: max(_LEAST[draw["dtype"]], _TIMES * error)
            for name, error in alone.items()
        }
    else:
        family: Family = value(draw, "family")
        bounds = dict.fromkeys(worst, family.bound)
    beyond = [
        f"{name} {worst[name]:.2g} > {bounds[name]:.2g}"
        for name in worst
        if not worst[name] <= bounds[name]
    ]
    return Outcome("differs" if beyond else "equal", ", ".join(beyond), worst)


def _errors(draw: Draw, found: Found, truth: Found) -> dict[str, float]:
    """The largest relative difference of each sort of result."""
    events = [0.0]
    for (replica, result), (_, expected) in zip(
        found.events, truth.events, strict=True
    ):
        if (
            not result.is_floating_point()
        ):  # the tokens of a text, of which rounding may choose others
            events.append(
                float(draw["dtype"] == "float64" and not torch.equal(result, expected))
            )
        else:
            events.append(
                _apart(
                    [result], [expected[replica] if expected.ndim == 3 else expected]
                )
            )
    return {
        "losses": _apart(found.losses, truth.losses),
        "gradients": _apart_by_name(found.gradients, truth.gradients),
        "norms": _apart(found.norms, truth.norms),
        "events": max(events),
        "weights": _apart_by_name(found.weights, truth.weights),
    }


def _apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference, infinite if there are no numbers."""
    errors = [0.0]
    for one, two in zip(found, expected, strict=True):
        error = relative(one, two)
        errors.append(error if error == error else float("inf"))
    return max(errors)


def _apart_by_name(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference; of what is next to nothing, such as a bias on keys, as a share of the largest one."""
    if missing := found.keys() ^ expected.keys():
        raise AssertionError(f"only one side has {sorted(missing)[:3]}")
    floor = 1e-3 * max([0.0, *(float(each.norm()) for each in expected.values())])
    errors = [0.0]
    for name, wanted in expected.items():
        error = float((found[name].double() - wanted.double()).norm()) / max(
            float(wanted.norm()), floor, 1e-30
        )
        errors.append(error if error == error else float("inf"))
    return max(errors)


def shrunk(pool: Pool, draw: Draw, outcome: Outcome) -> tuple[Draw, Outcome]:
    """Take the first row of one table after the other, as long as the outcome is still of that kind."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(draw, pool.size):
            found = judge(pool, smaller)
            if found.kind == outcome.kind:
                draw, outcome, is_smaller = smaller, found, True
                break
    return draw, outcome


def _smaller(draw: Draw, ranks: int) -> Iterator[Draw]:
    for name, rows in TABLES.items():
        for row in rows:
            if row == draw[name]:
                break
            smaller = settled(draw | {name: row}, ranks)
            if line_of(smaller) != line_of(draw):
                yield smaller
            if name == "family":  # the simplest one or its own
                break
