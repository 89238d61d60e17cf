"""Bytes that each kind of layer keeps for backward, as fused kernels hold recurrences (PyTorch code holds more)."""

from ringspan.core.selection import position_bytes
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.states import span_states
from ringspan.plan.model.kinds import PARTS, LayerKind
from ringspan.plan.model.shapes import ModelShape

_FLOAT32 = 4


def parts_of(kind: LayerKind, setting: Setting) -> dict[str, int]:
    """Return bytes per token by part: ``kinds.PARTS``, attention's result with log-sum-exp, and mixing by states."""
    a, in_chunks = setting.number_bytes, setting.norm_tokens > 0
    # A ring keeps latents: the keys and values that they are expanded to are computed again.
    parts = {
        name: each.bytes(a, norms_in_chunks=in_chunks)
        for name, each in zip(PARTS, kind.kept, strict=True)
    }
    if setting.latent_dim(kind):
        expanded = kind.heads * (2 * kind.head_dim - kind.rotary + kind.value_dim)
        parts["heads"] -= a * kind.calls * (expanded - kind.rotary)
    if kind.index and kind.index.window:
        # The chosen columns, as int32.
        parts["heads"] += _FLOAT32 * (
            kind.index.window + kind.index.most(setting.length)
        )
    return parts | {
        "attention": result_bytes(kind, setting),
        "mixing": a * (kind.mixed + 2 * _out(kind)),
    }


def result_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return the bytes of a token's result and log-sum-exp, and of its choice."""
    return kind.calls * (
        setting.number_bytes * kind.out_size + _FLOAT32 * kind.heads
    ) + chosen_bytes(kind, setting)


def chosen_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return the bytes of a token's choice, which is kept as positions."""
    return position_bytes(setting.length) * kind.index.kept if kind.index else 0


def saved_per_token(local: ModelShape, setting: Setting, layers: int) -> int:
    """Return the bytes per token that ``layers`` layers keep from forward to backward.

    full        inputs of segments, and choices that layers pass on
    attention   and each layer's attention result, log-sum-exp and choice, and results of states on a ring
    none        all parts of ``parts_of``, but not a feed-forward that runs in chunks
    """
    a, counts = setting.number_bytes, local.counted(layers)
    if setting.checkpoint == "none":
        total = 0
        for kind, count in counts.items():
            parts = parts_of(kind, setting)
            if setting.tokens_at_once(kind):
                del parts["feedforward"]
            total += count * sum(parts.values())
        return total
    inputs = (
        a * local.hidden * local.streams * -(-layers // setting.layers_per_checkpoint)
    )
    inputs += a * sum(kind.shared * count for kind, count in counts.items())
    if setting.checkpoint == "full":
        passed = (
            (kind, count)
            for kind, count in counts.items()
            if kind.index and kind.index.is_passed
        )
        return inputs + sum(
            count * chosen_bytes(kind, setting) for kind, count in passed
        )
    # On one rank nothing is exchanged, so results of states are recomputed; results of convolutions always are.
    outs = {
        kind: a * kind.scan.out for kind in counts if kind.scan and setting.ring > 1
    }
    return inputs + sum(
        count * (outs.get(kind, 0) + result_bytes(kind, setting))
        for kind, count in counts.items()
    )


def states_bytes(local: ModelShape, setting: Setting, layers: int) -> int:
    """Return the bytes of states that ``layers`` layers keep from forward to backward."""
    if setting.checkpoint == "full":
        return 0
    return sum(
        count * span_bytes(kind, setting)
        for kind, count in local.counted(layers).items()
    )


def span_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return the bytes of the state, map and convolution inputs that a layer receives for a rank's spans."""
    states = _FLOAT32 * (kind.scan.state + kind.scan.map_) if kind.scan else 0
    each = states + setting.number_bytes * kind.halo * kind.channels
    return (
        each
        and setting.batch
        * span_states(setting.layout, setting.length, setting.ring)
        * each
    )


def mixing_backward_bytes(kind: LayerKind, setting: Setting) -> int:
    """Return backward's extra bytes: gradients of inputs and results, states between chunks, and exchanged states."""
    between = _FLOAT32 * kind.scan.chunk_states if kind.scan else 0.0
    here = setting.number_bytes * (kind.mixed + 2 * _out(kind)) + between
    return round(setting.tokens * here) + 2 * span_bytes(kind, setting)


def seen_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return bytes that towers keep of a micro-step's largest share of images; on a CPU all pixels too."""
    found = 0
    for tower in shape.towers:
        growth = tower.saved if setting.checkpoint == "none" else tower.checkpointed
        found += growth.at(tower.share(setting.batch, setting.ring))
    return found + (0 if setting.on_gpu else pixel_bytes(shape, setting))


def pixel_bytes(shape: ModelShape, setting: Setting) -> int:
    return _FLOAT32 * setting.batch * sum(tower.pixels for tower in shape.towers)


def _out(kind: LayerKind) -> int:
    return kind.scan.out if kind.scan else kind.channels
