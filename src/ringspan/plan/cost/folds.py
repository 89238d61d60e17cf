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
    """Keys and values; the first gradients that a fold gets of them take the same bytes."""
    results: float


def per_token(counts: Mapping[LayerKind, int], setting: Setting) -> PerToken:
    """Return the bytes per token of a fold that wait for later folds and backward."""
    keys = sum(
        count * setting.number_bytes * keys_of(kind) for kind, count in counts.items()
    )
    return PerToken(
        keys, sum(count * _results(kind, setting) for kind, count in counts.items())
    )


def _results(kind: LayerKind, setting: Setting) -> float:
    found = 0.0 if setting.checkpoint == "full" else result_bytes(kind, setting)
    if kind.scan:  # each fold keeps a state
        found += _FLOAT32 * setting.batch * kind.scan.state / setting.fold.tokens
    return found


def _gradients(kind: LayerKind, setting: Setting, turns: int, folds: int) -> int:
    """Return gradient bytes per token, summed over ``folds`` folds, after backward of ``turns`` later folds.

    A fold's first gradient of its keys waits as attention returned it, a sum of more in float32.
    """
    reached = folds_reached(kind, setting) if turns else 0
    summed = min(folds, max(0, reached - 1)) if turns > 1 else 0
    return keys_of(kind) * (
        setting.number_bytes * (min(folds, reached) - summed) + _FLOAT32 * summed
    )


def keys_of(kind: LayerKind) -> int:
    """Return the numbers per token of a layer's keys and values."""
    return kind.calls * kind.kv_heads * (kind.head_dim + kind.value_dim)


def folds_reached(kind: LayerKind, setting: Setting) -> int:
    before, seen = setting.folds - 1, kind.mask.earlier
    return before if seen is None else min(before, -(-seen // setting.fold.length))


def folds_read(kind: LayerKind, setting: Setting) -> int:
    """Return the pairs (fold, earlier fold that it sees) of a sequence."""
    reached = folds_reached(kind, setting)
    return reached * setting.folds - reached * (reached + 1) // 2


def waiting_bytes(
    local: ModelShape, setting: Setting, done: int, attending: LayerKind | None = None
) -> int:
    """Return the most bytes that wait when backward has finished ``done`` layers of one of the last three folds.

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
    """Return what waits during one fold's turn; its own keys are no longer kept."""
    earlier, left = setting.folds - 1 - turn, local.counted(local.layers - done)
    total = earlier * sum(per_token(local.counted(local.layers), setting))
    for kind, count in local.counted(local.layers).items():
        total += left.get(kind, 0) * _gradients(kind, setting, turn, earlier + 1)
        total += (count - left.get(kind, 0)) * _gradients(
            kind, setting, turn + 1, earlier
        )
    # Gradients for earlier folds are added up before the fold's own are freed.
    if attending is not None:
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
    """Return the bytes of other folds' keys and gradients on the device: of the fold being read and of the next."""
    others, a = (
        min(setting.folds - 1, folds_reached(kind, setting)),
        setting.number_bytes,
    )
    # The last folds, with the bytes of a number in a gradient at that time: none, one, or a float32 sum.
    turns = enumerate((0, a, _FLOAT32)[: setting.folds])
    most = max(
        min(2, others, setting.folds - 1 - turn) * (a + gradient)
        for turn, gradient in turns
    )
    return setting.fold.tokens * most * keys_of(kind)


def copied_bytes(kind: LayerKind, setting: Setting) -> float:
    """Return a layer's bytes per step that are copied to the host and back on one rank, both directions together."""
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
