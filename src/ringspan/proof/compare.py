"""Relative errors of a run against plain transformers, and the first place that is wrong."""

from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ringspan.proof.batches import Batch
from ringspan.proof.steps import Outcome

BOUND: Final = 1e-9
"""Relative error in float64 that rounding stays below."""
_NEGLIGIBLE: Final = 1e-3
"""Share of the largest gradient below which one is held to that, since it may be nothing but rounding."""


class Error(NamedTuple):
    """The largest relative error of a comparison, and the tensor that has it."""

    value: float
    of: str


class Place(NamedTuple):
    """The first tensor beyond the bound: what it is, its error, and the positions that differ in a row."""

    what: str
    error: float
    row: int | None = None
    positions: tuple[int, ...] = ()

    def __str__(self) -> str:
        said = f"{self.what} (relative error {self.error:.1e})"
        if self.row is None:
            return said
        shown = ", ".join(map(str, self.positions[:8]))
        more = f" and {len(self.positions) - 8} more" if len(self.positions) > 8 else ""
        return f"{said}, in row {self.row} at positions {shown}{more}"


def worst_error(found: Outcome, expected: Outcome, batch: Batch | None = None) -> Error:
    """Return the largest error of losses, gradients, weights, and logits of the batch's tokens, or of all."""
    return max(_errors(found, expected, batch), key=lambda error: error.value)


def _errors(found: Outcome, expected: Outcome, batch: Batch | None) -> Iterable[Error]:
    """Yield the error of each loss, gradient, weight, and of all logits, in the order of a step."""
    for step, (one, other) in enumerate(
        zip(found.losses, expected.losses, strict=True)
    ):
        yield Error(_relative(one, other), f"the loss of step {step + 1}")
    yield from _gradient_errors(found, expected)
    for name, weight in expected.weights.items():
        yield Error(_relative(found.weights[name], weight), name)
    if found.logits is not None and expected.logits is not None:
        real = slice(None) if batch is None else batch.real
        error = _relative(found.logits[real], expected.logits[real])
        yield Error(error, "the logits in evaluation")


def _gradient_errors(found: Outcome, expected: Outcome) -> Iterable[Error]:
    """Yield each gradient's error, infinite if only one of the two runs has it."""
    norms = [float(g.norm()) for g in expected.gradients.values() if g is not None]
    floor = _NEGLIGIBLE * max(norms, default=0.0)
    for name, gradient in expected.gradients.items():
        other = found.gradients[name]
        what = f"the gradient of {name}"
        if gradient is None or other is None:
            is_missing = (gradient is None) != (other is None)
            yield Error(float("inf") if is_missing else 0.0, what)
            continue
        size = max(float(gradient.norm()), floor)
        difference = float((other.double() - gradient.double()).norm())
        yield Error(_ratio(difference, size), what)


def first_place(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    batch: Batch,
    bound: float,
) -> Place | None:
    """Return the first hidden states of a forward pass beyond the bound, in the order of their computation."""
    real = batch.real
    for name, hidden in found.items():
        truth = expected.get(name)
        if truth is None or truth.shape != hidden.shape:
            continue
        error = _relative(hidden[real], truth[real])
        if error <= bound:
            continue
        apart = (hidden - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-300)
        rows, positions = ((apart > bound) & real).nonzero(as_tuple=True)
        row = int(rows[0])
        here = tuple(int(each) for each in positions[rows == row])
        return Place(f"the output of {name}", error, row, here)
    return None


def first_gradient(found: Outcome, expected: Outcome, bound: float) -> Place | None:
    """Return the last layer's gradient beyond the bound, which backward computes first."""
    beyond = [each for each in _gradient_errors(found, expected) if each.value > bound]
    if not beyond:
        return None
    last = beyond[-1]
    return Place(last.of, last.value)


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = float((found.double() - expected.double()).norm())
    return _ratio(difference, float(expected.double().norm()))


def _ratio(difference: float, size: float) -> float:
    if not torch.isfinite(torch.tensor(difference)):
        return float("inf")
    return difference / size if size else difference
