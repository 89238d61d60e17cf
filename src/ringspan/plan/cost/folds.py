"""Bytes that wait between folds: keys and values, their gradients, results of attention; and copies of these."""

from collections.abc import Mapping
from typing import NamedTuple

from ringspan.plan.cost.kept import result_bytes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape

_FLOAT32 = 4


class PerToken(NamedTuple):
    keys: float
    """And values; as many bytes of the first gradients of these that a fold gets."""
    results: float


def per_token(counts: Mapping[LayerKind, int], setting: Setting) -> PerToken:
    """Return what waits of one token of a fold."""
    keys = sum(
        count * setting.number_bytes * keys_of(kind) for kind, count in counts.items()
    )
    return PerToken(
        keys, sum(count * _results(kind, setting) for kind, count in counts.items())
    )


def _results(kind: LayerKind, setting: Setting) -> float:
    found = 0.0 if setting.checkpoint == "full" else result_bytes(kind, setting)
    if kind.scan:  # a state for each fold
        found += _FLOAT32 * setting.batch * kind.scan.state / setting.fold.tokens
    return found


def _gradients(kind: LayerKind, setting: Setting, turns: int, folds: int) -> int:
    """Return bytes of a fold's token, summed over ``folds`` folds, when ``turns`` later ones had theirs in backward.

    A fold's first gradient of its keys waits as attention returned it, a sum of more in float32.
    """
    reached = folds_reached(kind, setting) if turns else 0
    summed = min(folds, max(0, reached - 1)) if turns > 1 else 0
    return keys_of(kind) * (
        setting.number_bytes * (min(folds, reached) - summed) + _FLOAT32 * summed
    )


def keys_of(kind: LayerKind) -> int:
    return kind.calls * kind.kv_heads * (kind.head_dim + kind.value_dim)


def folds_reached(kind: LayerKind, setting: Setting) -> int:
    before = setting.folds - 1
    return (
        before
        if kind.window is None
        else min(before, -(-(kind.window - 1) // setting.fold.length))
    )


def folds_read(kind: LayerKind, setting: Setting) -> int:
    reached = folds_reached(kind, setting)
    return reached * setting.folds - reached * (reached + 1) // 2


def waiting_bytes(
    local: ModelShape, setting: Setting, done: int, attending: LayerKind | None = None
) -> int:
    """Return the most that waits when backward has finished ``done`` layers of a fold: of one of the last three.

    ``attending``: the next layer, if its attention is under way.
    """
    turns = range(min(3, setting.folds))
    return max(
        (_waiting(local, setting, turn, done, attending) for turn in turns), default=0
    )


def _waiting(
    local: ModelShape,
    setting: Setting,
    turn: int,
    done: int,
    attending: LayerKind | None,
) -> int:
    """Return the same in one fold's turn; its own keys are not kept any more."""
    earlier, left = setting.folds - 1 - turn, local.counted(local.layers - done)
    total = earlier * sum(per_token(local.counted(local.layers), setting))
    for kind, count in local.counted(local.layers).items():
        total += left.get(kind, 0) * _gradients(kind, setting, turn, earlier + 1)
        total += (count - left.get(kind, 0)) * _gradients(
            kind, setting, turn + 1, earlier
        )
    if attending is not None:  # earlier folds' gradients are summed before its own go
        after, before = (
            _gradients(attending, setting, each, earlier) for each in (turn + 1, turn)
        )
        total += after - before
    return round(setting.fold.tokens * total)


def most_waiting(local: ModelShape, setting: Setting, kept: int = 0) -> int:
    """Return the most that waits at any time, with ``kept`` bytes of the fold whose backward pass begins."""
    if setting.folds == 1:
        return kept
    whole, folds = per_token(local.counted(local.layers), setting), setting.folds
    forward = round(
        setting.fold.tokens * ((folds - 1) * whole.keys + folds * whole.results)
    )
    return max(
        forward,
        kept + waiting_bytes(local, setting, 0),
        waiting_bytes(local, setting, local.layers),
    )


def brought_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return what is on the device of one layer's other folds: of the one that computes and of the next."""
    others, a = (
        min(setting.folds - 1, folds_reached(kind, setting)),
        setting.number_bytes,
    )
    # of the last folds, by what a gradient has by then
    turns = enumerate((0, a, _FLOAT32)[: setting.folds])
    most = max(
        min(2, others, setting.folds - 1 - turn) * (a + gradient)
        for turn, gradient in turns
    )
    return setting.fold.tokens * most * keys_of(kind)


def copied_bytes(kind: LayerKind, setting: Setting) -> float:
    """Return a layer's bytes of a step that go to the host and come back, on one rank, both ways together."""
    if setting.folds == 1 or setting.offload == "none":
        return 0.0
    tokens, numbers, reads = (
        setting.fold.tokens,
        keys_of(kind),
        folds_read(kind, setting),
    )
    again = 3 if setting.checkpoint == "full" else 1  # forward passes of attention
    a, firsts = setting.number_bytes, setting.folds - 1 if reads else 0
    keys = a * numbers * (setting.folds - 1 + reads * (again + 1))
    gradients = 2 * numbers * (_FLOAT32 * (reads - firsts) + a * firsts)
    return tokens * (keys + gradients + 2 * _results(kind, setting) * setting.folds)
