"""Bytes that each kind of layer keeps for backward, per token or per sequence's states.

Recurrences are counted as fused kernels hold them: inputs, result, and the states between chunks while backward runs.
Transformers' PyTorch code holds more.
"""

from ringspan.core.costs import layer_parts, saved_bytes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.states import span_states
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape

_FLOAT32 = 4


def parts_of(local: ModelShape, kind: LayerKind, setting: Setting) -> dict[str, int]:
    """Return bytes per token by part (``core.costs.layer_parts``); ``mixing`` is of recurrences and convolutions."""
    a = setting.number_bytes
    parts = layer_parts(local, a, norms_in_chunks=setting.norm_tokens > 0)
    if not local.kinds:
        return parts
    if not kind.attends:
        parts["heads"] = parts["attention"] = 0
    if not kind.intermediate:
        parts["feedforward_norm"] = 0
    parts["feedforward"] = 4 * a * kind.intermediate
    return parts | {"mixing": a * (kind.mixed + 2 * _out(kind))}


def saved_per_token(local: ModelShape, setting: Setting, layers: int) -> int:
    """Return the bytes per token that the first ``layers`` layers of a rank's share keep from forward to backward."""
    if not local.kinds:
        return saved_bytes(
            local,
            setting.number_bytes,
            setting.checkpoint,
            layers=layers,
            layers_per_checkpoint=setting.layers_per_checkpoint,
            feedforward_in_chunks=bool(setting.feedforward_tokens),
            norms_in_chunks=bool(setting.norm_tokens),
        )
    kinds = local.kinds[:layers]
    if setting.checkpoint == "none":
        in_chunks = bool(setting.feedforward_tokens)
        parts = (parts_of(local, kind, setting) for kind in kinds)
        return sum(sum(each.values()) - in_chunks * each["feedforward"] for each in parts)
    inputs = setting.number_bytes * local.hidden * -(-layers // setting.layers_per_checkpoint)
    if setting.checkpoint == "full":
        return inputs
    # On one rank nothing is exchanged: results of states are computed again there.
    outs = sum(setting.number_bytes * _out(kind) for kind in kinds) if setting.ring > 1 else 0
    return inputs + outs + sum(parts_of(local, kind, setting)["attention"] for kind in kinds)


def states_bytes(local: ModelShape, setting: Setting, layers: int) -> int:
    """Return the bytes of states and maps that the spans of the first ``layers`` layers keep, whatever their length."""
    if not local.kinds or setting.checkpoint == "full":
        return 0
    return sum(span_bytes(kind, setting) for kind in local.kinds[:layers])


def span_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return the bytes of the states and maps of one layer's spans."""
    if kind.scan is None:
        return 0
    spans = span_states(setting.layout, setting.length, setting.ring)
    return _FLOAT32 * setting.batch * spans * (kind.scan.state + kind.scan.map_)


def mixing_backward_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return backward's extra bytes: gradients of inputs and results, states between chunks, and exchanged states."""
    between = _FLOAT32 * kind.scan.chunk_states if kind.scan else 0.0
    here = setting.number_bytes * (kind.mixed + 2 * _out(kind)) + between
    return round(setting.tokens * here) + 2 * span_bytes(kind, setting)


def seen_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return bytes that towers keep of a micro-step's largest image share; all pixels too on a CPU."""
    found = 0
    for tower in shape.towers:
        growth = tower.saved if setting.checkpoint == "none" else tower.checkpointed
        found += growth.at(tower.share(setting.batch, setting.ring))
    return found + (0 if setting.on_gpu else pixel_bytes(shape, setting))


def tower_layer_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes that one layer of a tower keeps of that share without a checkpoint."""
    return max(tower.saved.at(tower.share(setting.batch, setting.ring)) // tower.layers for tower in shape.towers)


def pixel_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes of a micro-step's pixels, all of which every rank of a ring has in its host's memory."""
    return _FLOAT32 * setting.batch * sum(tower.pixels for tower in shape.towers)


def _out(kind: LayerKind) -> int:
    return kind.scan.out if kind.scan else kind.channels
