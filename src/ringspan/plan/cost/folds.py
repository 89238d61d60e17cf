"""Bytes that wait between folds: keys and values, their gradients, results of attention; and copies of these."""

from collections.abc import Mapping
from typing import NamedTuple

from ringspan.plan.cost.kept import result_bytes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape

_FLOAT32 = 4


class PerToken(NamedTuple):
    keys: float = 0
    gradients: float = 0
    results: float = 0

    def times(self, keys: float, gradients: float, results: float) -> float:
        return keys * self.keys + gradients * self.gradients + results * self.results


def per_token(counts: Mapping[LayerKind, int], setting: Setting) -> PerToken:
    """Return what waits of one token: gradients, in float32, only of folds within a window's reach."""
    rows = [[count * each for each in _of_kind(kind, setting)] for kind, count in counts.items()]
    return PerToken(*map(sum, zip(*rows, strict=True)))


def _of_kind(kind: LayerKind, setting: Setting) -> PerToken:
    numbers = keys_of(kind)
    others = setting.folds - 1
    reached = folds_reached(kind, setting) / others if others else 0.0
    results = 0 if setting.checkpoint == "full" else result_bytes(kind, setting.number_bytes)
    if kind.scan:  # a state for each fold
        results += _FLOAT32 * setting.batch * kind.scan.state / setting.fold.tokens
    return PerToken(setting.number_bytes * numbers, _FLOAT32 * numbers * reached, results)


def keys_of(kind: LayerKind) -> int:
    return kind.calls * kind.kv_heads * (kind.head_dim + kind.value_dim)


def folds_reached(kind: LayerKind, setting: Setting) -> int:
    before = setting.folds - 1
    return before if kind.window is None else min(before, -(-(kind.window - 1) // setting.fold.length))


def folds_read(kind: LayerKind, setting: Setting) -> int:
    reached = folds_reached(kind, setting)
    return reached * setting.folds - reached * (reached + 1) // 2


def waiting_bytes(local: ModelShape, setting: Setting, done: int) -> int:
    """Return what waits when backward has finished ``done`` layers of the last fold, or of the one before."""
    if setting.folds == 1:
        return 0
    whole = per_token(local.counted(local.layers), setting)
    left = per_token(local.counted(local.layers - done), setting)
    over, others = PerToken(*(a - b for a, b in zip(whole, left, strict=True))), setting.folds - 1
    last = whole.times(others, 0, others) + over.times(0, others, 0)
    before = whole.times(others, others, others - 1) - over.times(1, 1, 0)
    return round(setting.fold.tokens * max(last, before))


def most_waiting(local: ModelShape, setting: Setting) -> int:
    whole, folds = per_token(local.counted(local.layers), setting), setting.folds
    most = max(whole.times(folds - 1, 0, folds), whole.times(folds - 1, folds - 1, folds - 1))
    return round(setting.fold.tokens * most) if folds > 1 else 0


def brought_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return what is on the device of one layer's other folds: of the one that computes and of the next."""
    here = min(2, folds_reached(kind, setting))
    return setting.fold.tokens * here * keys_of(kind) * (setting.number_bytes + _FLOAT32)


def copied_bytes(kind: LayerKind, setting: Setting) -> float:
    """Return a layer's bytes of a step that go to the host and come back, on one rank, both ways together."""
    if setting.folds == 1 or setting.offload == "none":
        return 0.0
    tokens, numbers, reads = setting.fold.tokens, keys_of(kind), folds_read(kind, setting)
    again = 3 if setting.checkpoint == "full" else 1  # forward passes of attention
    a, results = setting.number_bytes, _of_kind(kind, setting).results
    keys = a * numbers * (setting.folds - 1 + reads * (again + 1))
    return tokens * (keys + _FLOAT32 * numbers * 2 * reads + 2 * results * setting.folds)
