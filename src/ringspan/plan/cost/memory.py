"""Bytes that one rank holds in a training step, by formula: what ``dryrun`` traces, in microseconds.

FSDP2 over the ring, AdamW, checkpointed layers, the blockwise loss. Each moment that can be the highest is written out
below; tests hold them against the trace. T tokens of a rank (all sequences of a micro-step), C hidden size, I
intermediate size, H, G heads, D head size, V vocabulary, N ranks of the ring, U of a Ulysses group.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ringspan.core.costs import loss_bytes
from ringspan.core.schedule.route import Heads, Route, member_heads
from ringspan.core.schedule.workspace import Shape, head_groups
from ringspan.core.selection import Index
from ringspan.plan.cost import kept
from ringspan.plan.cost.chosen import most_backward_bytes
from ringspan.plan.cost.folds import brought_bytes, keys_of, waiting_bytes
from ringspan.plan.cost.loop import loop_bytes, tile_pairs
from ringspan.plan.cost.setting import Setting, check_setting
from ringspan.plan.cost.shards import (
    local_parameter_bytes,
    local_trained_bytes,
    moment_bytes,
    trained_number_bytes,
)
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape

# the only moment that depends on the route
ATTENTION_MOMENT: Final = "attention backward"

# Share of what a step allocates and frees that the allocator reserves on top, with expandable segments, which
# ``ringspan train`` sets. Without them an H200 reserved 32% more (131,072 tokens, benchmarks/results).
RESERVE: Final = 0.03
_FLOAT32: Final = 4
_INDICES: Final = 3 * 8  # tokens, positions and labels are int64
# Offloading brings back a layer's input, attention's result and its lse ahead of their use.
_PIECES_AHEAD: Final = 3


@dataclass(frozen=True)
class Memory:
    moment: str
    bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def reserve_bytes(self) -> int:
        """Bytes on top that the caching allocator holds in blocks that nothing fits."""
        return round(
            RESERVE
            * sum(
                self.bytes[name]
                for name in ("activations", "temporaries", "communication")
            )
        )

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes + self.reserve_bytes


def training_memory(shape: ModelShape, setting: Setting) -> Memory:
    """Return a rank's highest moment once the optimizer has its state; errors of ``check_setting``."""
    check_setting(shape, setting)
    step = _Step(shape, setting)
    moments = (
        step.gather(),
        *step.losses(),
        *step.layers(),
        *step.towers(),
        *step.embedding(),
        step.update(),
    )
    return max(moments, key=lambda memory: memory.peak_bytes)


def gathered_layer_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes of the largest layer once gathered: of experts in slices, the one in use and the next."""
    shape = shape.split(setting.tp)
    return max(
        shape.bytes_of(
            kind.parameters
            - (kind.experts[1] - 2 * part if (part := setting.slice_of(kind)) else 0),
            kind.packed,
            setting.number_bytes,
        )
        for kind in shape.counted(shape.layers)
    )


def held_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes that a decoder keeps on the device from forward to backward, besides its batch."""
    step = _Step(shape, setting)
    return step.kept(shape.layers) + step.end + step.inputs - setting.tokens * _INDICES


class _Step:
    """Moments of a step on a rank with its share of heads, feed-forward and vocabulary."""

    def __init__(self, shape: ModelShape, setting: Setting) -> None:
        """Collect the sizes in bytes that the moments add up, with a rank's share under tensor parallelism and FSDP.

        ``a``, ``p``: bytes of a computed number and of a gradient. ``setting`` is of one fold, ``whole`` of the
        sequence. ``parameters``, ``trained``, ``moments``: the rank's shards. ``hidden``: the rank's hidden states;
        ``inputs``, ``end``: what is kept before the layers and after them; ``seen``: what towers keep. ``layer``,
        ``layer_bytes``: numbers and bytes of the largest layer, gathered; ``gathered``: bytes of the root. ``head``:
        numbers of the head's gradient.
        """
        self.shape, self.whole, self.setting = (
            shape.split(setting.tp),
            setting,
            setting.fold,
        )
        setting = setting.fold
        self.a, self.p = setting.number_bytes, trained_number_bytes(shape, setting)
        self.tokens, self.ranks = setting.tokens, setting.ring
        self._attention_bytes: dict[LayerKind, tuple[int, int]] = {}
        self.root, kinds = self.shape.root, self.shape.counted(self.shape.layers)
        self.layer = max(
            max(kind.trained - self.sliced(kind), setting.slice_of(kind))
            for kind in kinds
        )
        self.layer_bytes = gathered_layer_bytes(shape, setting)
        # The next layer's weights, without experts that are gathered in slices.
        self.next_bytes = max(self._bytes_beside_slices(kind) for kind in kinds)
        # The unpacked weights of one layer, while it computes.
        self.unpacked = self.a * max(kind.packed for kind in kinds)
        self.parameters = local_parameter_bytes(shape, setting)
        self.trained, self.moments = (
            local_trained_bytes(shape, setting),
            moment_bytes(shape, setting),
        )
        self.hidden = self.tokens * self.a * shape.hidden
        self.saved = partial(kept.saved_per_token, self.shape, setting)
        self.states = partial(kept.states_bytes, self.shape, setting)
        in_chunks = bool(setting.norm_tokens)
        around, last_norm = (
            each.bytes(self.a, norms_in_chunks=in_chunks) for each in shape.around
        )
        self.inputs = self.whole.tokens * _INDICES + self.tokens * around
        self.end = self.hidden + self.tokens * last_norm
        self.seen = kept.seen_bytes(shape, setting)
        self.head = 0 if shape.lora else self.shape.vocab * shape.hidden
        # The root's parameters stay gathered from the first layer to the last gradient.
        self.gathered = self.a * self.root

    def sliced(self, kind: LayerKind) -> int:
        """Return the trained weights of a layer's experts that slices reduce before the rest of the layer."""
        is_sliced = self.setting.slices_of(kind) > 1 and not kind.frozen
        return kind.experts[1] if is_sliced else 0

    def _bytes_beside_slices(self, kind: LayerKind) -> int:
        sliced = kind.experts[1] if self.setting.slices_of(kind) > 1 else 0
        return self.shape.bytes_of(kind.parameters - sliced, kind.packed, self.a)

    def kept(self, layers: int, *, backward: bool = False) -> int:
        """Return what ``layers`` layers keep on the device, with recomputed inputs; if offloaded, prefetched pieces."""
        setting = self.setting
        segment = setting.layers_per_checkpoint
        again = (
            max(0, layers % segment - 1) * self.hidden * self.shape.streams
            if backward
            else 0
        )
        if setting.offload == "none":
            return self.tokens * self.saved(layers) + self.states(layers) + again
        ahead = min(1, layers)
        # A piece is only a layer's input then: three pieces are the inputs of three segments.
        if setting.checkpoint == "full":
            ahead = segment * min(_PIECES_AHEAD, layers // segment)
        return self.tokens * self.saved(ahead) + again if backward else 0

    def memory(
        self,
        moment: str,
        *,
        activations: int = 0,
        temporaries: int = 0,
        communication: int = 0,
        gradients: int = 0,
        done: int | None = None,
        attending: LayerKind | None = None,
    ) -> Memory:
        """Build a moment, in a layer's backward pass when ``done`` later layers are finished."""
        on_device = done is not None and self.setting.offload == "none"
        waiting = (
            waiting_bytes(self.shape, self.whole, done or 0, attending)
            if on_device
            else 0
        )
        return Memory(
            moment,
            {
                "parameters": self.parameters,
                "gradients": self.trained if self.whole.folds > 1 else gradients,
                "optimizer": 0 if self.setting.has_moments_on_host else self.moments,
                "activations": activations + self.inputs + waiting,
                "temporaries": temporaries,
                "communication": communication,
            },
        )

    def gather(self) -> Memory:
        """Moment when the root's gathered parameters are copied out, with the first layer's in flight."""
        return self.memory(
            "gathering", communication=2 * (self.gathered + self.layer_bytes)
        )

    def losses(self) -> list[Memory]:
        """Moments when the loss has a chunk of logits and gradients, and when the head's gradient is rounded."""
        setting = self.setting
        loss = loss_bytes(
            self.shape.hidden,
            self.shape.vocab,
            self.a,
            chunk_tokens=min(setting.loss_chunk_tokens, self.tokens),
            chunk_vocabulary=setting.loss_chunk_vocabulary,
        )
        sums, rounded = (0, 0) if self.shape.lora else (loss.sums, loss.rounded)
        return [
            self.memory(
                moment,
                activations=self.kept(self.shape.layers) + self.end + self.seen,
                temporaries=sums + temporaries + self.hidden,
                communication=self.gathered + self.layer_bytes,
                done=0,
            )
            for moment, temporaries in (
                ("loss", loss.block),
                ("loss backward", rounded),
            )
        ]

    def layers(self) -> list[Memory]:
        """Moments of the last, second last and first layer, and of segments whose inputs were just recomputed."""
        layers, segment = self.shape.layers, self.setting.layers_per_checkpoint
        ends = {layers - segment, layers % segment} if segment < layers else set[int]()
        # The last layer of each kind, as most is kept when its backward pass runs.
        differ = {
            layers - 1 - number
            for number in {
                kind: at for at, kind in enumerate(self.shape.kinds)
            }.values()
        }
        done = sorted({0, min(1, layers - 1), layers - 1} | ends | differ)
        parts = (self._feedforward, self._norm, self._attention)
        found = [
            moment(number)
            for number in done
            for moment in parts
            if self._has(moment, number)
        ]
        return found + [
            self._mixing(number)
            for number in sorted(differ)
            if self._kind(number).mixed
        ]

    def _kind(self, done: int) -> LayerKind:
        """Return the layer whose backward pass runs when ``done`` later layers are finished."""
        return self.shape.kinds[self.shape.layers - 1 - done]

    def _has(self, moment: Callable[[int], Memory], done: int) -> bool:
        kind = self._kind(done)
        return kind.attends if moment == self._attention else bool(kind.intermediate)

    def _backward(
        self,
        moment: str,
        done: int,
        activations: int,
        temporaries: int,
        communication: int = 0,
    ) -> Memory:
        """Build a moment of a layer's backward pass when ``done`` later layers are finished."""
        layers = self.shape.layers
        # The gradients of the layer finished last, being reduced in float32.
        reducing = _FLOAT32 * self.layer if done else 0
        prefetched = self.next_bytes if done + 1 < layers else 0
        # This layer's slices have summed their gradients before the rest has any.
        own = self.p * self.sliced(self._kind(done)) // self.ranks
        return self.memory(
            moment,
            activations=self.kept(layers - 1 - done, backward=True)
            + activations
            + self.seen,
            temporaries=self.a * self.head + self.hidden + self.unpacked + temporaries,
            communication=self.gathered
            + self.layer_bytes
            + prefetched
            + reducing
            + communication,
            gradients=self.p * self.shape.trained_of_layers(done) // self.ranks + own,
            done=done,
            attending=self._kind(done) if moment == ATTENTION_MOMENT else None,
        )

    def _made_again(self, kind: LayerKind) -> dict[str, int]:
        """Return what a layer holds when its backward pass begins: kept, or recomputed."""
        parts = {
            name: self.tokens * size
            for name, size in kept.parts_of(kind, self.setting).items()
        }
        if self.setting.tokens_at_once(kind):
            del parts["feedforward"]
        if self.setting.checkpoint != "none":
            norms_copy = (
                self.shape.has_rms
                and self.a < _FLOAT32
                and not self.setting.norm_tokens
            )
            parts["input"] = self.hidden if norms_copy else 0
        return parts

    def _gradients(self, kind: LayerKind, weights: int) -> int:
        """Return the bytes of a layer's new weight gradients: of ``weights``, or of its adapters."""
        return self.a * (kind.trained if kind.frozen else weights)

    def _feedforward(self, done: int) -> Memory:
        """Moment at the product's gradient: three of its size (of a chunk, with all tokens' and weights' gradients)."""
        shape, a, kind = self.shape, self.a, self._kind(done)
        chunk, made = (
            self.setting.tokens_at_once(kind),
            sum(self._made_again(kind).values()),
        )
        if not chunk:
            wide = self.tokens * a * kind.intermediate
            # The gradient of one product's weight; experts in one tensor have one gradient.
            weight = self._gradients(kind, kind.feedforward // kind.products)
            return self._backward(
                "feed-forward backward", done, made, 2 * wide + weight
            )
        parts = (
            kept.parts_of(kind, self.setting)["feedforward"] + 2 * a * kind.intermediate
        )
        # Blocks add up their gradients in float32, and a slice of one block has its own.
        sums = _FLOAT32 + (a if a < _FLOAT32 else 0)
        slices = self.setting.slices_of(kind)
        if slices > 1 and slices * chunk >= self.tokens:
            sums = a
        weights = sums * self._gradients(kind, self._weights_of_experts(kind)) // a
        here = min(chunk, self.tokens) * (parts + 3 * a * shape.hidden)
        here += self._sums_of_slices(kind)
        return self._backward(
            "feed-forward backward", done, made, self.hidden + here + weights
        )

    def _weights_of_experts(self, kind: LayerKind) -> int:
        """Return the weights of a feed-forward that have gradients at once: of experts in slices, one slice's."""
        part = self.setting.slice_of(kind)
        return kind.feedforward - (kind.experts[1] - part if part else 0)

    def _sums_of_slices(self, kind: LayerKind) -> int:
        """Return the bytes of the inputs' gradients, which slices add up in float32, and of the order of rows."""
        if self.setting.slices_of(kind) == 1:
            return 0
        chosen = round(kind.chosen * kind.experts[0])
        return self.tokens * (_FLOAT32 * self.shape.hidden + 2 * _INDICES * chosen)

    def _norm(self, done: int) -> Memory:
        """Backward of the feed-forward's norm: four float32 copies (of a chunk) and a gradient."""
        kind = self._kind(done)
        held = sum(
            size
            for name, size in self._made_again(kind).items()
            if name != "feedforward"
        )
        made = self.hidden
        if self.shape.has_rms:
            copies, rows = (
                4 * _FLOAT32 * self.shape.hidden,
                min(self.setting.norm_tokens, self.tokens),
            )
            # A chunk is recomputed, and its gradient exists before it is copied to the others.
            again = (_FLOAT32 + 3 * self.a) * self.shape.hidden
            made = (
                self.hidden + rows * (copies + again) if rows else self.tokens * copies
            )
        return self._backward(
            "norm backward",
            done,
            held,
            made + self._gradients(kind, kind.feedforward - self.sliced(kind)),
        )

    def _mixing(self, done: int) -> Memory:
        """Backward of a recurrence or convolution: inputs, results and their gradients."""
        kind = self._kind(done)
        made = self._made_again(kind)
        held = sum(
            made.get(name, 0)
            for name in ("input", "norm", "heads", "attention", "mixing")
        )
        weights = self._gradients(kind, kind.parameters - kind.feedforward)
        return self._backward(
            "state backward",
            done,
            held,
            weights + kept.mixing_backward_bytes(kind, self.setting),
        )

    def _attention(self, done: int) -> Memory:
        """Moment in the ring's backward pass: inputs, results and what the loop holds."""
        shape, kind = self.shape, self._kind(done)
        made = self._made_again(kind)
        ours = sum(
            made.get(name, 0)
            for name in ("input", "norm", "heads", "attention", "mixing")
        )
        # With an index, results have the numbers of a latent, more than the output projection takes.
        out = (
            min(kind.mixing, shape.hidden * kind.out_size)
            if kind.index
            else shape.hidden * kind.out_size
        )
        weights = self._gradients(
            kind, kind.parameters - kind.mixing + out - self.sliced(kind)
        )
        dout = self.tokens * self.a * kind.out_size
        if kind not in self._attention_bytes:
            self._attention_bytes[kind] = attention_backward_bytes(kind, self.setting)
        # Own keys' gradients and the sum for the queries wait while earlier folds add theirs.
        held, in_transit = self._attention_bytes[kind]
        if self.whole.folds > 1:
            queries = _FLOAT32 * kind.heads * kind.head_dim
            held += self.tokens * (queries + self.a * keys_of(kind))
            if self.setting.offload != "none":
                held += brought_bytes(kind, self.whole)
        return self._backward(
            ATTENTION_MOMENT, done, ours, dout + weights + held, in_transit
        )

    def towers(self) -> list[Memory]:
        """Moment in backward of a tower's last layer: recomputed, with gradients of the layer and of embeddings."""
        shape, setting = self.shape, self.setting
        if not shape.towers:
            return []
        largest, placed = (
            max(shape.tower_layers),
            sum(tower.tokens * tower.row for tower in shape.towers),
        )
        made = sum(
            t.share(setting.batch, self.ranks) * t.tokens / t.units * t.row
            for t in shape.towers
        )
        layer = max(
            tower.saved.at(tower.share(setting.batch, self.ranks)) // tower.layers
            for tower in shape.towers
        )
        again = 0 if setting.checkpoint == "none" else layer
        return [
            self.memory(
                "tower backward",
                activations=self.seen + again,
                temporaries=self.a
                * (self.head + round(made) + setting.batch * placed // self.ranks)
                + layer,
                communication=self.gathered + (2 * self.a + _FLOAT32) * largest,
                gradients=self.p * shape.trained_of_layers(shape.layers) // self.ranks,
            )
        ]

    def embedding(self) -> list[Memory]:
        """Moments when the root has its gradients: after all layers, copied to be reduced, and reduced."""
        root = self.shape.trained_root
        gradients, own = (
            self.p * (self.shape.trained - root) // self.ranks,
            self.a * root,
        )
        # A tied weight has the head's gradient, the embedding's, and their sum.
        tied = 2 * self.a * self.head if self.shape.tied else 0
        reduced = (_FLOAT32 + (self.p if self.p < _FLOAT32 else 0)) * root // self.ranks
        return [
            self.memory(
                "embedding backward",
                temporaries=own + tied,
                communication=self.gathered + _FLOAT32 * self.layer,
                gradients=gradients,
            ),
            self.memory(
                "embedding reduction",
                temporaries=own,
                communication=_FLOAT32 * root,
                gradients=gradients,
            ),
            # The head's gradient is still there after it was copied.
            self.memory(
                "embedding reduction",
                temporaries=self.a * self.head,
                communication=_FLOAT32 * root + reduced,
                gradients=gradients,
            ),
        ]

    def update(self) -> Memory:
        """AdamW, which on a GPU takes the roots of all second moments at once, unless they are packed."""
        one_by_one = (
            self.setting.optimizer_on_host or self.setting.optimizer_state != "float32"
        )
        roots = self.trained if self.setting.on_gpu and not one_by_one else 0
        return self.memory("optimizer", temporaries=roots, gradients=self.trained)


def attention_backward_bytes(kind: LayerKind, setting: Setting) -> tuple[int, int]:
    """Return backward's bytes on this rank's heads without inputs and dout: (results, sums and tiles; in transit).

    Between groups these are ``loop_bytes``. A Ulysses group first trades dout, q, out, k, v: the copies stay during the
    loop, and a part for each other member is in flight. At the end it trades the gradients, without copies. The largest
    counts.
    """
    if kind.index:
        return _chosen_backward_bytes(kind, kind.index, setting)
    if latent_dim := setting.latent_dim(kind):
        return _latent_backward_bytes(kind, setting, latent_dim)
    way, a, tokens = setting.way.backward, setting.number_bytes, setting.tokens
    mine = member_heads(kind.heads, kind.kv_heads, way.ulysses)[0]
    # Numbers per local token of queries, results, and keys with values.
    queries, outs = (
        way.ulysses * _count(mine.queries) * size
        for size in (kind.head_dim, kind.value_dim)
    )
    keys = way.ulysses * _count(mine.keys) * (kind.head_dim + kind.value_dim)
    groups, between = setting.ring // way.ulysses, replace(way, ulysses=1)
    head_groups = _head_groups(setting, kind, mine, between, groups)
    # If members share keys, the loop's float32 sums are sent, and the owner adds them up.
    summed = _FLOAT32 if way.ulysses > kind.kv_heads else a
    sizes = queries, keys, head_groups, a, summed
    per_token = loop_bytes(
        setting.layout,
        groups,
        between,
        *sizes,
        setting.sent_as,
        in_place=setting.on_gpu,
    )
    held = per_token.times(tokens)
    results = tokens * (a * queries + keys * summed)
    if way.ulysses == 1:
        return results + round(held.sums), round(held.in_transit)
    lse = _FLOAT32 * kind.heads
    copies, others = (
        tokens * (a * (queries + 2 * outs + keys) + lse),
        1 - 1 / way.ulysses,
    )
    back = (
        a
        * tokens
        * (
            kind.heads * kind.head_dim
            + kind.kv_heads * (kind.head_dim + kind.value_dim)
        )
    )
    moments = (
        (copies, 2 * others * copies),
        (copies + results + round(held.sums), round(held.in_transit)),
        (results + back, 2 * others * results),
    )
    return max(((here, round(in_transit)) for here, in_transit in moments), key=sum)


def _chosen_backward_bytes(
    kind: LayerKind, index: Index, setting: Setting
) -> tuple[int, int]:
    """Return ``attention_backward_bytes`` of attention to chosen keys: positions are unpacked, then looked up."""
    sizes, a = (
        (kind.heads, kind.kv_heads, kind.head_dim, kind.value_dim),
        setting.number_bytes,
    )
    shape = Shape(setting.batch, *sizes, a, index=index)
    held = most_backward_bytes(setting.layout, setting.length, setting.ring, shape)
    columns = index.window + index.most(setting.length) * index.keys
    here = a * kind.heads * kind.head_dim + 2 * 4 * columns
    return round(held.sums) + setting.tokens * here, round(held.in_transit)


def _latent_backward_bytes(
    kind: LayerKind, setting: Setting, latent_dim: int
) -> tuple[int, int]:
    """Return ``attention_backward_bytes`` if latents travel, once for all heads.

    The keys and values of one group of heads exist at a time, with their gradients and the gradients of the
    expansion's weights.
    """
    a, tokens, way = (
        setting.number_bytes,
        setting.tokens,
        Route.parse(setting.route_of(kind), setting.ring),
    )
    queries, heads = kind.heads * kind.head_dim, slice(0, kind.heads)
    held = loop_bytes(
        setting.layout,
        setting.ring,
        way,
        queries,
        latent_dim,
        1,
        a,
        a,
        setting.sent_as,
    ).times(tokens)
    both = kind.head_dim + kind.value_dim
    group = kind.heads // _head_groups(
        setting, kind, Heads(heads, heads), way, setting.ring
    )
    # Expanded keys exist twice: in the product's result, and copied together with the rotary part.
    expanded = a * tokens * group * (both + kind.head_dim - kind.rotary)
    gradients = (a + max(a, _FLOAT32)) * tokens * group * both
    weights = max(a, _FLOAT32) * kind.latent * kind.heads * (both - kind.rotary)
    results = a * tokens * (queries + latent_dim)
    return results + round(held.sums) + expanded + gradients + weights, round(
        held.in_transit
    )


def _head_groups(
    setting: Setting, kind: LayerKind, mine: Heads, way: Route, ranks: int
) -> int:
    """Return the number of groups of heads that attention of a layer runs in turn."""
    tokens = setting.tokens * setting.ring // ranks
    return head_groups(
        setting.batch * _count(mine.queries),
        _count(mine.keys),
        ranks,
        tile_pairs(setting.layout, setting.length // ranks),
        on_cpu=not setting.on_gpu,
        blocks=2
        if way.name != "all-gather"
        else ranks
        if setting.layout == "striped"
        else 2 * ranks,
        rank_pairs=ranks * tokens**2 // 2,
        key_bytes=setting.number_bytes * tokens * _count(mine.keys) * kind.head_dim,
    )


def _count(heads: slice) -> int:
    return heads.stop - heads.start
