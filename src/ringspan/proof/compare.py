"""Relative errors of a run against plain transformers in float64, their bounds, and the first place that is wrong."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ringspan.proof.batches import Batch
from ringspan.proof.routed import share_elsewhere
from ringspan.proof.steps import Outcome

BOUND: Final = 1e-9
"""Relative error in float64 that rounding stays below."""
MARGIN: Final = 4.0
"""Distances from float64 that a ring may have in another dtype, in those of one process.

Blocks are merged in another order, so that the two round apart from each other, and which tensor is worst is chance:
a few times the same distance is rounding. A mistake in a kernel is many times that.
"""
_NEGLIGIBLE: Final = 1e-3
_NEGLIGIBLE_ROUNDED: Final = 1e-2
"""Share of the largest gradient below which one is held to that, since it may be nothing but rounding.

In narrower dtypes the few numbers of a router's bias, sums that cancel, are rounded at a share of 3e-3.
"""
_LOSS, _GRADIENT, _WEIGHT, _LOGITS = "loss", "gradient", "weight", "logits"
_NORM, _CHOICE = "norm", "choice"
_NEAR_TIES: Final = 0.05
"""Share of choices of experts that rounding may decide at least, though it decided none on one process.

Scores of random weights are close, so up to that many ended otherwise in bfloat16. A router that chooses by something
else sends most tokens elsewhere.
"""


class Error(NamedTuple):
    """The largest relative error of a comparison by its bound, and the tensor that has it."""

    share: float
    value: float
    of: str
    bound: float


class _Found(NamedTuple):
    """A tensor's relative error; ``kind`` is what its bound is made for."""

    value: float
    of: str
    kind: str


class Bounds:
    """The largest relative errors that are rounding, of a kind of tensor each, or of a layer's output."""

    def __init__(
        self, distances: Mapping[str, float] | None, dtype: torch.dtype
    ) -> None:
        """Take the distances of one process from float64 by kind. Runs in float64 have no distances."""
        self._distances = distances
        self._least = torch.finfo(dtype).eps
        self.negligible = _NEGLIGIBLE if distances is None else _NEGLIGIBLE_ROUNDED

    def __getitem__(self, kind: str) -> float:
        if self._distances is None:
            return BOUND
        least = _NEAR_TIES if kind == _CHOICE else self._least
        return MARGIN * max(self._distances.get(kind, 0.0), least)


IN_FLOAT64: Final = Bounds(None, torch.float64)


def bounds_of(
    one: Outcome, truth: Outcome, batch: Batch | None, dtype: torch.dtype
) -> Bounds:
    """Return the bounds of a batch in a dtype: what one process is apart from float64, at its worst, of each kind."""
    worst: dict[str, float] = {}
    for error in _errors(one, truth, batch, _NEGLIGIBLE_ROUNDED):
        worst[error.kind] = max(worst.get(error.kind, 0.0), error.value)
    return Bounds(worst, dtype)


def worst_error(
    found: Outcome,
    expected: Outcome,
    batch: Batch | None = None,
    bounds: Bounds = IN_FLOAT64,
) -> Error:
    """Return the largest error of losses, gradients, weights, and logits of the batch's tokens, or of all."""
    return max(
        Error(error.value / bounds[error.kind], *error[:2], bounds[error.kind])
        for error in _errors(found, expected, batch, bounds.negligible)
    )


def _errors(
    found: Outcome, expected: Outcome, batch: Batch | None, negligible: float
) -> Iterable[_Found]:
    """Yield the error of each loss, gradient, weight, and of all logits, in the order of a step."""
    for step, (one, other) in enumerate(
        zip(found.losses, expected.losses, strict=True)
    ):
        yield _Found(_relative(one, other), f"the loss of step {step + 1}", _LOSS)
    yield from _gradient_errors(found, expected, negligible)
    for step, (one, other) in enumerate(zip(found.norms, expected.norms, strict=True)):
        what = f"the gradient's norm in step {step + 1}"
        yield _Found(_relative(one, other), what, _NORM)
    for name, weight in expected.weights.items():
        yield _Found(_relative(found.weights[name], weight), name, _WEIGHT)
    if found.logits is not None and expected.logits is not None:
        real = slice(None) if batch is None else batch.real
        error = _relative(found.logits[real], expected.logits[real])
        yield _Found(error, "the logits in evaluation", _LOGITS)
    if found.choice is not None and expected.choice is not None:
        share = share_elsewhere(found.choice, expected.choice)
        yield _Found(share, "the experts that routers choose", _CHOICE)


def _gradient_errors(
    found: Outcome, expected: Outcome, negligible: float
) -> Iterable[_Found]:
    """Yield each gradient's error, infinite if only one of the two runs has it."""
    norms = [float(g.norm()) for g in expected.gradients.values() if g is not None]
    floor = negligible * max(norms, default=0.0)
    for name, gradient in expected.gradients.items():
        other = found.gradients[name]
        what = f"the gradient of {name}"
        if gradient is None or other is None:
            is_missing = (gradient is None) != (other is None)
            yield _Found(float("inf") if is_missing else 0.0, what, _GRADIENT)
            continue
        size = max(float(gradient.norm()), floor)
        difference = float((other.double() - gradient.double()).norm())
        yield _Found(_ratio(difference, size), what, _GRADIENT)


class Place(NamedTuple):
    """The first tensor beyond its bound: what it is, its error, and the positions that differ, a row of them each."""

    what: str
    error: float
    wrong: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        said = f"{self.what} (relative error {self.error:.1e})"
        row = next((number for number, row in enumerate(self.wrong) if row), None)
        if row is None:
            return said
        positions = self.wrong[row]
        shown = ", ".join(map(str, positions[:8]))
        more = f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        return f"{said}, in row {row} at positions {shown}{more}"


def first_place(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    batch: Batch,
    one: dict[str, Tensor] | None,
    dtype: torch.dtype,
) -> Place | None:
    """Return the first hidden states of a forward pass beyond the bound, in the order of their computation.

    ``one``: the states on one process in the dtype, unless that is float64.
    """
    real = batch.real
    for name, hidden in found.items():
        truth = expected.get(name)
        if truth is None or truth.shape != hidden.shape:
            continue
        distances = None
        if one is not None:
            distances = {name: _relative(one[name][real], truth[real])}
        bound = Bounds(distances, dtype)[name]
        error = _relative(hidden[real], truth[real])
        if error <= bound:
            continue
        sizes = truth.double().norm(dim=-1).clamp_min(1e-300)
        apart = (hidden.double() - truth.double()).norm(dim=-1) / sizes
        wrong = (apart > bound) & real
        rows = tuple(tuple(row.nonzero()[:, 0].tolist()) for row in wrong)
        return Place(f"the output of {name}", error, rows)
    return None


def first_gradient(found: Outcome, expected: Outcome, bounds: Bounds) -> Place | None:
    """Return the last layer's gradient beyond the bound, which backward computes first."""
    beyond = [
        error
        for error in _gradient_errors(found, expected, bounds.negligible)
        if error.value > bounds[error.kind]
    ]
    return Place(beyond[-1].of, beyond[-1].value) if beyond else None


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = float((found.double() - expected.double()).norm())
    return _ratio(difference, float(expected.double().norm()))


def _ratio(difference: float, size: float) -> float:
    if not torch.isfinite(torch.tensor(difference)):
        return float("inf")
    return difference / size if size else difference
