"""Joint decision of all ranks before a step is applied: flags and step number, reduced by maximum once."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.core.errors import PeerMismatch, RingspanError
from ringspan.core.messages.lines import few
from ringspan.torch.engine.transport.collectives import gather
from ringspan.torch.model.layers.modules import local_part
from ringspan.train.config.tables import GuardConfig
from ringspan.train.signals import StopRequest

_MIN_STEPS: Final = 20  # fewer steps give no meaningful z-score
# Floors in natural logarithms. Without one, any ripple of a loss that hardly moves would be a large z-score.
_MIN_DEVIATION: Final = {"loss": 0.02, "gradient norm": 0.1}


class Diverged(RingspanError):
    """A loss or gradient that is not finite; the weights are those of the step before."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    apply: bool
    stop: bool
    rewind: bool
    problem: str | None  # reason for not applying the step, or a remark worth a line
    peak_bytes: int  # largest of any rank


class Guard:
    def __init__(
        self, config: GuardConfig, stop: StopRequest, device: torch.device
    ) -> None:
        self._config, self._stop, self._device = config, stop, device
        self._spikes = Spikes(config.spike_window_steps, config.spike_zscore)
        self._skipped_in_a_row = 0
        self._rewinds = 0

    def judge(
        self,
        step: int,
        loss: float,
        norm: float,
        parameters: Iterable[tuple[str, Tensor]],
        peak_bytes: int,
    ) -> Verdict:
        """Return all ranks' verdict on a step whose gradients are computed but not applied."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = (
            self._spikes.describe(loss, norm)
            if finite and self._config.spike != "off"
            else None
        )
        # One reduction for everything that ranks have to agree on. The maxima of a number and of its negative tell
        # whether all ranks have the same number.
        flags = [
            not finite,
            self._stop.signal_name is not None,
            spike is not None,
            step,
            -step,
            peak_bytes,
        ]
        votes = torch.tensor(
            [float(flag) for flag in flags], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        any_not_finite, any_stop, any_spike, last, first, peak = votes.tolist()
        if last != -first:
            raise PeerMismatch(
                f"restart all: different steps: from {-first:.0f} to {last:.0f}; this rank at {step}"
            )
        verdict: dict[str, Any] = {"stop": bool(any_stop), "peak_bytes": int(peak)}
        if any_not_finite:
            return Verdict(
                apply=False,
                rewind=False,
                problem=self._not_finite(step, loss, norm, parameters),
                **verdict,
            )
        self._skipped_in_a_row = 0
        # Only ordinary steps are kept for comparison: a spike among them would make the next one look ordinary.
        if not any_spike:
            self._spikes.accept(loss, norm)
            return Verdict(apply=True, rewind=False, problem=None, **verdict)
        spike = f"step {step}: {spike or 'a spike on another rank'}"
        action = self._config.spike
        if action == "rewind" and self._rewinds == self._config.max_rewinds:
            action, spike = "report", f"{spike}; rewound {self._rewinds} times already"
        if action == "report":
            self._spikes.accept(loss, norm)  # a lasting new level stops being a spike
        self._rewinds += action == "rewind"
        return Verdict(
            apply=action == "report",
            rewind=action == "rewind",
            problem=spike,
            **verdict,
        )

    def state(self) -> dict[str, Any]:
        return {
            "skipped_in_a_row": self._skipped_in_a_row,
            "rewinds": self._rewinds,
            "spikes": self._spikes.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``; a run that rewinds keeps its count of rewinds."""
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        # A checkpoint from before the rewinds has a lower count, with which a run could rewind forever.
        self._rewinds = max(self._rewinds, int(state["rewinds"]))
        self._spikes.restore(state["spikes"])

    def _not_finite(
        self,
        step: int,
        loss: float,
        norm: float,
        parameters: Iterable[tuple[str, Tensor]],
    ) -> str:
        text = f"step {step}: loss {loss}, gradient norm {norm}; {_where(parameters)}"
        self._skipped_in_a_row += 1
        # The step was not applied, so a restart loses nothing.
        if self._config.non_finite == "stop":
            raise Diverged(
                f"{text}; the weights are those of step {step - 1}: lower optimizer.learning_rate"
            )
        if self._skipped_in_a_row > self._config.max_skipped_steps:
            raise Diverged(
                f"{text}; {self._skipped_in_a_row - 1} steps before it were skipped already: lower "
                "optimizer.learning_rate"
            )
        return f"{text}: skipped"


class Spikes:
    """Log loss and log gradient norm in standard deviations above the mean of the last 20 accepted steps."""

    def __init__(self, window_steps: int, zscore: float) -> None:
        self._zscore = zscore
        self._last: dict[str, deque[float]] = {
            name: deque(maxlen=window_steps) for name in _MIN_DEVIATION
        }

    def describe(self, loss: float, norm: float) -> str | None:
        """Return a line about a loss or gradient norm that is a spike; None if neither is, or steps are too few.

        A spike is more than ``zscore`` standard deviations above the mean of the last 20 steps, in logarithms because
        losses and norms vary by factors.
        """
        for (name, last), value in zip(self._last.items(), (loss, norm), strict=True):
            if len(last) < _MIN_STEPS:
                continue
            mean = statistics.fmean(list(last)[-_MIN_STEPS:])
            # The deviation of changes between steps, so that a steady fall of the loss is not noise (von Neumann 1941).
            changes = [(b - a) ** 2 for a, b in itertools.pairwise(last)]
            deviation = max(
                math.sqrt(statistics.fmean(changes) / 2), _MIN_DEVIATION[name]
            )
            zscore = (_log(value) - mean) / deviation
            if zscore > self._zscore:
                return f"{name} {value:.4g} is {zscore:.1f} standard deviations above {math.exp(mean):.4g}"
        return None

    def accept(self, loss: float, norm: float) -> None:
        for last, value in zip(self._last.values(), (loss, norm), strict=True):
            last.append(_log(value))

    def state(self) -> dict[str, list[float]]:
        return {name: list(last) for name, last in self._last.items()}

    def restore(self, state: dict[str, list[float]]) -> None:
        for name, last in self._last.items():
            last.clear()
            last.extend(float(value) for value in state[name])


def _log(value: float) -> float:
    return math.log(max(value, 1e-30))


def _where(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Name a rank and its tensor that is not finite: weights first, then gradients; collective.

    Of several it is the last in the model's order, at which backward met the first NaN.
    """
    weights, gradients = [], []
    for name, parameter in parameters:
        for found, tensor in ((weights, parameter), (gradients, parameter.grad)):
            if tensor is not None and not bool(
                torch.isfinite(local_part(tensor.detach())).all()
            ):
                found.append(name)
    everyone = gather((weights, gradients))
    for index, what in enumerate(("weights", "gradient")):
        found = {
            rank: lists[index] for rank, lists in enumerate(everyone) if lists[index]
        }
        if found:
            rank, names = next(iter(found.items()))
            others = sum(map(len, found.values())) - 1
            more = f" (and {others} more, on ranks {few(found)})" if others else ""
            return f"{what} of {names[-1]} not finite on rank {rank}{more}"
    return "every gradient is finite"
