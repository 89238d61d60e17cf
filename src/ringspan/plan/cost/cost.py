"""FLOPs, bytes on links and seconds of a training step; attention's come from ``passes``.

S tokens of a sequence, T of a rank, C hidden size, H, G heads, D head size, N ranks of the ring, P of tensor
parallelism.
"""

from dataclasses import dataclass, replace
from typing import Final

from ringspan.core.costs import training_flops
from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.core.schedule.timing import Pass, Speeds, one_after_the_other
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cluster.hardware import Device
from ringspan.plan.cost.chosen import scoring_flops
from ringspan.plan.cost.folds import copied_bytes, folds_read
from ringspan.plan.cost.kept import saved_per_token
from ringspan.plan.cost.passes import (
    Passes,
    attention_passes,
    repeated,
    seen_pairs,
)
from ringspan.plan.cost.setting import Setting
from ringspan.plan.cost.shards import local_trained_bytes
from ringspan.plan.cost.states import state_passes
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape

_GRADIENT_BYTES: Final = 4  # FSDP reduces in float32
# AdamW on the host: gradients and weights are copied there and weights back. Per weight it reads four numbers and
# writes three.
_HOST_STEP_COPIES: Final = 3
_HOST_STEP_ACCESSES: Final = 7
_HOP_SHARE: Final = 0.05
"""Share of a pass's launch time that a further hop adds, for a launch and two messages; assumed."""


@dataclass(frozen=True)
class _Time:
    """One layer's part of a ``StepCost``."""

    seconds: float
    compute_seconds: float
    attention_seconds: float
    ring_bytes: float
    shard_bytes: float
    tensor_bytes: float
    intra_node_bytes: float
    inter_node_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class StepCost(_Time):
    """One training step of the whole cluster.

    ``flops``: the model's, without recomputation; ``mfu``: their share of the data sheets'. Bytes arrive at one rank,
    for attention, FSDP (parameters, gradients) and tensor parallelism (sums), and by link; ``host_bytes`` go and come
    back. ``attention_seconds`` are part of ``compute_seconds``; ``gather_seconds`` and ``host_seconds``, which overlap
    with them, are what links and host take for FSDP's bytes and for copies of one direction.

    ``seconds`` are the longer of ``busy_seconds``, of devices and links, and ``launch_seconds``: the host's for
    the launches of all layers.
    """

    flops: float
    tokens: int
    mfu: float
    gather_seconds: float
    host_seconds: float
    busy_seconds: float
    launch_seconds: float

    @property
    def is_launch_bound(self) -> bool:
        """True if devices wait for their hosts."""
        return self.launch_seconds > self.busy_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        named = {
            "attention": self.attention_seconds,
            "other_computing": self.compute_seconds - self.attention_seconds,
        }
        beside = {"gathering": self.gather_seconds, "host_copies": self.host_seconds}
        waits = {
            "waiting": self.exposed_seconds,
            "launching": self.seconds - self.busy_seconds,
        }
        return named | waits | beside

    @property
    def exposed_seconds(self) -> float:
        """Seconds that devices wait for links or copies."""
        return self.busy_seconds - self.compute_seconds


def model_flops(shape: ModelShape, length: int) -> float:
    """Return one sequence's model FLOPs: ``training_flops``, three times a forward of states, and towers per image."""
    counts = shape.counted(shape.layers)
    # A score takes the numbers of a key, a result those of a value: the mean of both, twice.
    pairs = sum(
        count
        * kind.calls
        * kind.heads
        * (kind.head_dim + kind.value_dim)
        // 2
        * (seen_pairs(kind, length) + shape.later_pairs)
        for kind, count in counts.items()
    )
    scanned = (
        3 * length * sum(count * kind.scan_flops for kind, count in counts.items())
    )
    seen = sum(tower.units * tower.flops.at(1) for tower in shape.towers)
    # Gradients of frozen weights are not computed.
    frozen = (
        shape.matrix_parameters - shape.trained_of_layers(shape.layers)
        if shape.lora
        else 0
    )
    scored = sum(
        count * scoring_flops(kind.index, length)
        for kind, count in counts.items()
        if kind.index
    )
    return (
        training_flops(shape.matrix_parameters, length, pairs)
        - 2.0 * frozen * length
        + scanned
        + seen
        + scored
    )


def step_cost(
    shape: ModelShape,
    setting: Setting,
    device: Device,
    batch: int,
    attention: Passes = attention_passes,
) -> StepCost:
    """Return the cost of an optimizer step of ``batch`` sequences, split into micro-steps on each replica.

    Tensor-parallel sums wait; parameters, gradients and host traffic overlap with computation. Left out: the
    optimizer's time (except on the host), and the first and last hop's loss of overlap.
    """
    steps = ((setting.micro_steps(batch) - 1, False), (1, True))
    local = shape.split(setting.tp)
    kinds = local.counted(local.layers)
    parts: list[tuple[int, _Time]] = []
    launches = 0.0
    for repeats, is_last in (step for step in steps if step[0]):
        times = _LayerTimes(shape, setting, device, attention, is_last=is_last)
        parts.append((repeats, times.root()))
        if shape.towers:
            parts.append((repeats, times.towers()))
        parts += [(repeats * count, times.layer(kind)) for kind, count in kinds.items()]
        launches += repeats * sum(kinds.values()) * times.launches

    rows = ([count * cost for cost in vars(part).values()] for count, part in parts)
    total = _Time(*map(sum, zip(*rows, strict=True)))
    flops = batch * model_flops(shape, setting.length)
    if setting.optimizer_on_host:
        numbers = local_trained_bytes(shape, setting)
        copied = _HOST_STEP_COPIES * numbers
        # Assume that the host's memory is as fast as the device's link to it.
        seconds = (
            total.seconds
            + (copied + _HOST_STEP_ACCESSES * numbers) / device.host_bandwidth
        )
        total = replace(total, seconds=seconds, host_bytes=total.host_bytes + copied)
    launch_seconds = launches * device.launch_seconds
    busy_seconds = total.seconds
    total = replace(total, seconds=max(busy_seconds, launch_seconds))
    return StepCost(
        flops=flops,
        tokens=batch * setting.length,
        busy_seconds=busy_seconds,
        launch_seconds=launch_seconds,
        mfu=flops / (total.seconds * device.flops * setting.devices),
        gather_seconds=total.shard_bytes / device.bandwidth(setting.devices),
        host_seconds=total.host_bytes / 2 / device.host_bandwidth
        if device.host_bandwidth
        else 0.0,
        **vars(total),
    )


class _LayerTimes:
    """Seconds of one layer, forward and backward, on one rank, in the last micro-step or an earlier one."""

    def __init__(
        self,
        shape: ModelShape,
        setting: Setting,
        device: Device,
        attention: Passes,
        *,
        is_last: bool,
    ) -> None:
        """Derive how often each part of a layer is computed from the setting.

        ``first``: 1 if folds need a forward pass of their own, which backward repeats. ``again``: checkpoints recompute
        layers, ``attention_again``: attention too; ``made_again``: share of the layers whose output is recomputed for
        the inputs of a segment. ``kept``: bytes per token and layer that go to the host. ``root_sums``: tensor-parallel
        sums of the root.
        """
        self.is_last = is_last
        self.passes = attention
        self.shape, self.setting, self.device = shape.split(setting.tp), setting, device
        # A split vocabulary sums the embedding's output, and the gradient of the head's input.
        self.root_sums = 2 if self.shape.vocab < shape.vocab else 0
        self.kept = 0.0
        if setting.offload == "activations":
            self.kept = (
                saved_per_token(self.shape, setting.fold, shape.layers) / shape.layers
            )
        self.first = int(setting.folds > 1)
        # Peak numbers are for half precision; float32 runs as TF32 at about half of it, at best.
        self.peak = device.flops if setting.number_bytes < 4 else device.flops / 2
        self.again = setting.checkpoint != "none"
        self.attention_again = setting.checkpoint == "full"
        self.made_again = 1 - 1 / setting.layers_per_checkpoint

    @property
    def launches(self) -> float:
        """Passes of a layer that the host launches: forward, recomputation and backward of each fold, with all hops."""
        passes = 2 + self.again + self.made_again + self.first
        hops = self.setting.ring // self.setting.way.ulysses
        return self.setting.folds * passes * (1 + _HOP_SHARE * (hops - 1))

    def matrices(self, weights: float) -> float:
        """Return the seconds of multiplying a rank's tokens with ``weights`` weights once."""
        return (
            2.0
            * weights
            * self.setting.tokens
            / (self.peak * self.device.matmul_efficiency)
        )

    def root(self) -> _Time:
        """Time the head and what else is outside of layers; its weights are gathered once per forward pass."""
        shape = self.shape
        compute = (self.first + (2 if shape.lora else 3)) * self.matrices(
            shape.outside + shape.vocab * shape.hidden
        )
        weights = self.setting.number_bytes * shape.root, shape.trained_root
        # The root stays whole through a forward pass, so it is gathered once for each.
        gathers = self.setting.folds + self.first
        return self._time(
            compute,
            compute,
            weights,
            Pass(0, 0, 0, 0),
            sums=self.root_sums,
            gathers=gathers,
        )

    def towers(self) -> _Time:
        """Time towers and projectors on the largest share of images, with the transfer of embeddings."""
        setting, towers = self.setting, self.shape.towers
        flops = sum(
            tower.flops.at(tower.share(setting.batch, setting.ring)) for tower in towers
        )
        compute = (
            flops
            * (4 / 3 if self.again else 1.0)
            / (self.peak * self.device.matmul_efficiency)
        )
        placed = (
            setting.batch
            * sum(tower.tokens * tower.row for tower in towers)
            / setting.ring
        )
        others = max(1, setting.ring - 1)
        near = min(setting.ring, max(1, self.device.devices_per_node // setting.tp)) - 1
        # Embeddings of one other rank, and their gradients.
        each = 2 * setting.number_bytes * placed / setting.ring
        inside, outside = (
            near * each,
            (others - near) * each if setting.ring > 1 else 0.0,
        )
        sent = (
            inside / self.device.intra_node_bandwidth
            + outside / self.device.inter_node_bandwidth
        )
        exchange = Pass(0, 0, inside, outside)
        weights = sum(self.shape.tower_layers)
        return self._time(
            compute,
            compute + sent,
            (setting.number_bytes * weights, weights),
            exchange,
            sums=0,
        )

    def layer(self, kind: LayerKind) -> _Time:
        """Time one layer of a step: its matrix products, attention or states, and the bytes on links and to the host.

        Forward takes the products once. Backward takes them once for the inputs and, if trained, once for the weights;
        checkpoints and folds add recomputation.
        """
        setting = self.setting
        passes = self._mixing(kind)
        times = (
            2
            + (kind.trained / kind.matrices if kind.frozen else 1)
            + self.made_again
            + self.first
        )
        # Recomputation also counts the feed-forward's last product, which is not needed; blocks add no more.
        if self.again:
            times += 1
        elif setting.feedforward_tokens:
            times += min(1.0, kind.feedforward / kind.matrices)
        # Packed weights are read, and written in full, in each pass.
        matrices = times * self.matrices(kind.matrices)
        if kind.packed and self.device.memory_bandwidth:
            unpacked = self.shape.bytes_of(
                2 * kind.packed, kind.packed, setting.number_bytes
            )
            matrices += (
                (2 + bool(self.again) + self.first)
                * setting.folds
                * unpacked
                / self.device.memory_bandwidth
            )
        attention = one_after_the_other(*passes)
        return self._time(
            matrices + attention.compute_seconds,
            matrices + attention.seconds,
            (
                self.shape.bytes_of(kind.parameters, kind.packed, setting.number_bytes),
                kind.trained,
            ),
            attention,
            # Sums after attention and after the feed-forward, forward and backward, then the sums of recomputed parts.
            sums=4
            + bool(self.again)
            + (0 < (setting.feedforward_tokens or 0) < setting.tokens)
            + 2 * (self.made_again + self.first),
            host=2.0 * setting.tokens * self.kept + copied_bytes(kind, setting),
            # Weights are gathered for forward and backward, and to recompute the inputs of a segment: there not for its
            # last layer, and the one before stays for its own backward pass.
            gathers=setting.folds
            * (2 + self.first + max(0.0, 1 - 2 / setting.layers_per_checkpoint)),
        )

    def _mixing(self, kind: LayerKind) -> list[Pass]:
        """Time attention, states and convolutions, with recomputation: on a ring ``attention`` keeps states."""
        setting, (sizes, speeds) = self.setting, self._attention(kind)
        passes: list[Pass] = []
        if kind.attends:
            forward, backward = self._attend(kind, sizes, speeds)
            passes += [forward, backward]
            passes += (
                [forward] * self.first + self._computed_again(forward)
                if self.attention_again
                else []
            )
            passes += self._expansions(kind)
        if kind.scan or kind.halo:
            forward, backward = state_passes(
                setting.layout,
                setting.length,
                setting.ring,
                kind,
                setting.batch,
                setting.number_bytes,
                speeds,
            )
            passes += [forward, backward] + [forward] * self.first
            is_again = self.attention_again or (self.again and setting.ring == 1)
            passes += self._computed_again(forward) if is_again else []
        return passes

    def _expansions(self, kind: LayerKind) -> list[Pass]:
        """Time the expansion of latents that arrive, forward and backward, which has two more products."""
        setting = self.setting
        if kind.index or not setting.latent_dim(kind):
            return []
        # The expansion of the rank's own latents in forward is among the layer's matrices already.
        own = kind.calls * self.matrices(kind.expansion)
        arrived = (setting.ring - 1) * own
        return [
            Pass(seconds, seconds, 0.0, 0.0) for seconds in (arrived, 3 * arrived + own)
        ]

    def _attend(
        self, kind: LayerKind, sizes: Shape, speeds: Speeds
    ) -> tuple[Pass, Pass]:
        """Time attention of all folds, forward and backward: each fold to itself, and to the folds before it.

        Pairs with earlier folds are timed as full passes at a lower speed, so that they take the time of their real
        number.
        """
        setting, length = self.setting, self.setting.fold.length

        def both(mask: LayerMask, speeds: Speeds) -> tuple[Pass, Pass]:
            way = setting.route_of(kind), sizes, speeds
            return self.passes(setting.layout, length, setting.ring, mask, *way)

        if kind.index is not None:
            return both(CAUSAL, speeds)
        # Chunks are timed as windows of as many tokens, of whose pairs they have about half.
        own = seen_pairs(kind, length)
        timed, folds = kind.mask.as_window, setting.folds
        share = own / timed.num_pairs(length)
        found = repeated(kind.calls * folds, both(timed, speeds), share)
        if others := folds_read(kind, setting):
            pairs = (seen_pairs(kind, folds * length) - folds * own) / others
            slower = replace(
                speeds, flops=speeds.flops * CAUSAL.num_pairs(length) / max(pairs, 1.0)
            )
            earlier = repeated(kind.calls * others, both(CAUSAL, slower))
            return one_after_the_other(found[0], earlier[0]), one_after_the_other(
                found[1], earlier[1]
            )
        return found

    def _computed_again(self, forward: Pass) -> list[Pass]:
        return [forward, Pass(*(self.made_again * cost for cost in forward))]

    def _attention(self, kind: LayerKind) -> tuple[Shape, Speeds]:
        """Return a layer's sizes of attention, and a rank's speeds."""
        setting, device = self.setting, self.device
        sizes = kind.heads, kind.kv_heads, kind.head_dim, kind.value_dim
        return (
            Shape(
                setting.batch,
                *sizes,
                setting.number_bytes,
                setting.latent_dim(kind),
                kind.index,
                setting.sent_as,
            ),
            Speeds(
                self.peak * device.attention_efficiency,
                device.intra_node_bandwidth,
                device.inter_node_bandwidth,
                # Neighbours on a ring are one tp group apart.
                max(1, device.devices_per_node // setting.tp),
                on_cpu=not setting.on_gpu,
            ),
        )

    def _time(
        self,
        compute: float,
        seconds: float,
        weights: tuple[int, int],
        attention: Pass,
        *,
        sums: float,
        host: float = 0.0,
        gathers: float = 2,
    ) -> _Time:
        """Add FSDP traffic of ``weights`` (bytes, trained numbers) and tensor-parallel sums; links overlap."""
        setting, device = self.setting, self.device
        gathered, reduced = self._shard_bytes(weights, gathers)
        hidden = setting.tokens * self.shape.hidden * setting.number_bytes
        # An all-reduce is a reduce-scatter and an all-gather, each with (P - 1) / P of the bytes.
        tensor = sums * 2 * (1 - 1 / setting.tp) * hidden
        carried = {True: attention.intra_node_bytes, False: attention.inter_node_bytes}
        apart = setting.tp * setting.ring
        for num_bytes, ranks, distance in (
            (tensor, setting.tp, 1),
            (gathered, setting.ring, setting.tp),
            (reduced, setting.replicate, apart),
        ):
            for inside, share in _shares(
                ranks, distance, device.devices_per_node
            ).items():
                carried[inside] += num_bytes * share
        waited = tensor / device.bandwidth(setting.tp)
        busiest = max(
            carried[True] / device.intra_node_bandwidth,
            carried[False] / device.inter_node_bandwidth,
        )
        seconds = max(seconds + waited, busiest)
        # Copies to the host overlap with forward, a quarter of the layer's time, and back with backward, the rest.
        if host:
            one_way = host / 2 / device.host_bandwidth
            seconds += max(0.0, one_way - seconds / 4) + max(
                0.0, one_way - seconds * 3 / 4
            )
        return _Time(
            seconds=seconds,
            compute_seconds=compute,
            attention_seconds=attention.compute_seconds,
            ring_bytes=attention.intra_node_bytes + attention.inter_node_bytes,
            shard_bytes=gathered + reduced,
            tensor_bytes=tensor,
            intra_node_bytes=carried[True],
            inter_node_bytes=carried[False],
            host_bytes=host,
        )

    def _shard_bytes(
        self, weights: tuple[int, int], gathers: float
    ) -> tuple[float, float]:
        """Return FSDP's bytes of a layer around the ring, and across replicas, which reduce in the last micro-step."""
        setting = self.setting
        num_bytes, trained = weights
        reduced = setting.folds * trained * _GRADIENT_BYTES
        around = (1 - 1 / setting.ring) * (gathers * num_bytes + reduced)
        across = 2 * (1 - 1 / setting.replicate) * reduced / setting.ring
        return around, across if self.is_last else 0.0


def _shares(ranks: int, distance: int, per_node: int) -> dict[bool, float]:
    """Return a collective's shares of bytes inside and outside of nodes, left by each adapter in turn."""
    together = max(1, min(ranks, per_node // distance))
    if together == ranks:
        return {True: 1.0}
    return {True: 1.0 if together > 1 else 0.0, False: 1 / together}


def block_tokens_for_overlap(
    shape: ModelShape, setting: Setting, device: Device, bandwidth: float
) -> float:
    """Return a rank's tokens from which a forward hop computes longer than its block takes on a link.

    ``c = F e / B`` (``hardware.min_block_tokens``) with the efficiency e, G/H of the heads, and half of the pairs if a
    causal mask is balanced.
    """
    reached = device.flops * device.attention_efficiency
    causal_share = 0.5 if setting.ring > 1 else 1.0
    sent, kind = (
        setting.sent_as.sent_itemsize(setting.number_bytes),
        shape.attention,
    )
    share = kind.kv_heads / kind.heads
    if latent_dim := setting.latent_dim(kind):
        share = latent_dim / (kind.heads * (kind.head_dim + kind.value_dim))
    return reached / bandwidth * share * (sent / 2) / causal_share
