"""FLOPs, bytes on links and seconds of a training step, from the schedule's own counts.

S tokens of a sequence, T tokens of a rank, C hidden size, H, G heads, D head size, N ranks of the ring.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ringspan.core.layout import Layout, LayoutName
from ringspan.core.mask import causal, sliding_window
from ringspan.core.schedule import plan
from ringspan.plan.hardware import Device
from ringspan.plan.memory import Setting
from ringspan.plan.shapes import ModelShape

# Attention's matrix products: 2 in forward (scores, weighted values), 5 in backward (both again, and dq, dk, dv's).
_FORWARD_PRODUCTS: Final = 2
_BACKWARD_PRODUCTS: Final = 5
_GRADIENT_BYTES: Final = 4  # dk and dv travel in float32, and FSDP reduces in float32
_LARGEST_SCHEDULE: Final = 256  # ranks; above, the schedule of a causal ring is written down instead of computed


@dataclass(frozen=True)
class AttentionLoad:
    """One rank's part in the attention of one sequence and layer, for one head."""

    pairs: int
    hops: int
    sent_tokens: int
    sent_gradient_tokens: int


@lru_cache(maxsize=512)
def attention_load(layout: LayoutName, length: int, ranks: int, window: int | None, route: str) -> AttentionLoad:
    """What a rank does whose links carry as much as any, from its schedule.

    A causal zigzag ring of more than 256 ranks is counted by formula (a test holds it against the schedule).
    """
    split = Layout(layout, length, ranks)
    if window is None and layout == "zigzag" and ranks > _LARGEST_SCHEDULE and route == "ring":
        return balanced_load(split)
    mask = causal() if window is None else sliding_window(window)
    # The first and the last rank of a chain of blocks send less than those between them.
    schedule = plan(split, mask, max(ranks - 2, 0) if layout == "contiguous" else min(1, ranks - 1), None, route)
    hops = sum(1 for hop in schedule.hops if hop.num_pairs)
    return AttentionLoad(schedule.num_pairs, hops, schedule.sent_tokens, schedule.sent_gradient_tokens)


def balanced_load(split: Layout) -> AttentionLoad:
    """Rank 1 of a causal zigzag ring without padding: a share of half the pairs, whole blocks, and their gradients."""
    ranks, tokens = split.ranks, split.tokens_per_rank
    pairs = split.padded_length * (split.padded_length + 1) // 2 // ranks
    return AttentionLoad(pairs, ranks, (ranks - 1) * tokens, (ranks - 1) * tokens - tokens // 2)


@dataclass(frozen=True)
class StepCost:
    """One training step of the whole cluster.

    ``flops`` are the model's, of forward and backward over all sequences, without what checkpointing computes again.
    Bytes are what one rank sends: blocks and their gradients around the ring, parameters and gradients for FSDP.
    """

    flops: float
    seconds: float
    compute_seconds: float
    ring_bytes: float
    shard_bytes: float
    tokens: int
    mfu: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.compute_seconds


def model_flops(shape: ModelShape, length: int) -> float:
    """FLOPs of forward and backward over one sequence: 6 a weight and token, and 3 x 4 x D a causal pair and head."""
    pairs = sum(causal_pairs(length, window) for window in shape.layer_windows)
    return 6.0 * shape.matrix_parameters * length + 12.0 * shape.query_size * pairs


def causal_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of a causal sequence, in all or in a window."""
    window = length if window is None else min(window, length)
    return window * length - window * (window - 1) // 2


def step_cost(shape: ModelShape, setting: Setting, device: Device, batch: int) -> StepCost:
    """Time of a step of ``batch`` sequences: micro-steps of ``setting.batch`` sequences on each of the replicas.

    A hop takes the longer of computing and sending; parameters and gradients travel beside the layers' computation and
    share the link with the ring. The optimizer's own time, the loss of the first and last hop's overlap and launches
    are left out.
    """
    times = _LayerTimes(shape, setting, device)
    micro_steps = batch // (setting.replicate * setting.batch)
    layers = [times.layer(window) for window in shape.layer_windows]
    head = 3 * times.matrices(shape.vocab * shape.hidden)
    root_bytes = times.shard_bytes(shape.root_parameters)
    compute = head + sum(layer.compute for layer in layers)
    seconds = max(head, root_bytes / times.bandwidth) + sum(layer.seconds for layer in layers)
    ring_bytes = sum(layer.ring_bytes for layer in layers)
    shard_bytes = root_bytes + shape.layers * times.shard_bytes(shape.layer_parameters)
    flops = batch * model_flops(shape, setting.length)
    devices = setting.ring * setting.replicate
    return StepCost(
        flops=flops,
        seconds=micro_steps * seconds,
        compute_seconds=micro_steps * compute,
        ring_bytes=micro_steps * ring_bytes,
        shard_bytes=micro_steps * shard_bytes,
        tokens=batch * setting.length,
        mfu=flops / (micro_steps * seconds * device.flops * devices),
    )


@dataclass(frozen=True)
class _LayerTime:
    compute: float
    seconds: float
    ring_bytes: float


class _LayerTimes:
    """Seconds of one layer, forward and backward, on one rank."""

    def __init__(self, shape: ModelShape, setting: Setting, device: Device) -> None:
        self.shape, self.setting, self.device = shape, setting, device
        # Peak numbers are for half precision; float32 runs as TF32 at about half of it, at best.
        self.peak = device.flops if setting.number_bytes < 4 else device.flops / 2
        self.bandwidth = device.bandwidth(setting.ring)
        self.again = setting.checkpoint != "none"
        self.attention_again = setting.checkpoint == "full"

    def matrices(self, weights: int) -> float:
        """Seconds in which this rank's tokens are multiplied with so many weights."""
        return 2.0 * weights * self.setting.tokens / (self.peak * self.device.matmul_efficiency)

    def shard_bytes(self, parameters: int) -> float:
        """What FSDP sends for some parameters: gathered for forward and backward, gradients reduced and replicated."""
        setting, others = self.setting, 1 - 1 / self.setting.ring
        sent = parameters * others * (2 * setting.number_bytes + _GRADIENT_BYTES)
        if setting.replicate > 1:
            sent += 2 * (1 - 1 / setting.replicate) * parameters / setting.ring * _GRADIENT_BYTES
        return sent

    def layer(self, window: int | None) -> _LayerTime:
        shape, setting = self.shape, self.setting
        load = attention_load(setting.layout, setting.length, setting.ring, window, setting.route)
        product = 2.0 * load.pairs * shape.query_size * setting.batch
        product /= self.peak * self.device.attention_efficiency
        keys = 2 * shape.kv_size * setting.batch
        forward_bytes = load.sent_tokens * keys * setting.number_bytes
        backward_bytes = forward_bytes + load.sent_gradient_tokens * keys * _GRADIENT_BYTES
        passes = [(_FORWARD_PRODUCTS, forward_bytes)] * (2 if self.attention_again else 1)
        passes.append((_BACKWARD_PRODUCTS, backward_bytes))
        matrices = self.matrices(shape.layer_matrix_parameters) * (4 if self.again else 3)
        compute = matrices + sum(products * product for products, _ in passes)
        # All hops are alike but for the first, on the rank's own block: nothing need arrive before it.
        attention = sum(max(products * product, sent / self.bandwidth) for products, sent in passes)
        ring_bytes = sum(sent for _, sent in passes)
        link = (ring_bytes + self.shard_bytes(shape.layer_parameters)) / self.bandwidth
        return _LayerTime(compute, max(matrices + attention, link), ring_bytes)


def dataset_flops_ratio(hidden: int, length: int, base_length: int) -> float:
    """How much dearer a dataset becomes at a longer context: ``(6 C + S2) / (6 C + S1)``.

    From 24 C^2 + 4 S C FLOPs a token and layer (Liu, Zaharia, Abbeel 2023, appendix D), causal or not.
    """
    return (6 * hidden + length) / (6 * hidden + base_length)


def block_tokens_for_overlap(shape: ModelShape, setting: Setting, device: Device, bandwidth: float) -> float:
    """Tokens of a rank from which this model's forward hop computes longer than its block takes on a link.

    ``c = F e / B`` (see ``hardware.min_block_tokens``) with the attention that is reached, G/H of the heads to send,
    and half of the pairs when a causal mask is balanced over the ring.
    """
    reached = device.flops * device.attention_efficiency
    causal_share = 0.5 if setting.ring > 1 else 1.0
    return reached / bandwidth * (shape.kv_heads / shape.heads) * (setting.number_bytes / 2) / causal_share
