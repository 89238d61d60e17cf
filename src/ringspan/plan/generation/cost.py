"""Bytes and seconds of a prompt read over a ring, and of each token after it.

B prompts of a replica, n new tokens, C hidden size, H, G heads, D head size, V vocabulary, N ranks of the ring, P of
tensor parallelism. Layers of a kind cost the same.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Final

from ringspan.core.arguments import PREFILL_TOKENS, is_split
from ringspan.core.geometry.shares import BLOCK_TOKENS, Shares
from ringspan.core.names import WeightsName
from ringspan.core.schedule.timing import pair_flops
from ringspan.core.schedule.workspace import Shape
from ringspan.core.selection import SCORES_AT_ONCE
from ringspan.plan.cluster.devices import Device
from ringspan.plan.cost.chosen import scoring_flops
from ringspan.plan.cost.passes import seen_pairs
from ringspan.plan.cost.setting import dtype_bytes
from ringspan.plan.model.kinds import LayerKind
from ringspan.plan.model.shapes import ModelShape

# Seconds of a collective of a few bytes inside a node (True) and between nodes: most of what a ring adds to a token. No
# data sheet has it, so this is an assumption about NCCL; measure yours.
COLLECTIVE_SECONDS: Final = {True: 20e-6, False: 40e-6}
_FLOAT32: Final = 4
_CANDIDATE: Final = 8  # bytes of a score with its position
_MOST_TIMED: Final = 64  # chunks of a prompt that are timed one by one


@dataclass(frozen=True, kw_only=True)
class Text:
    """``batch`` prompts per replica on a ring, ``tp`` ranks per place; ``weights`` are whole or gathered per pass."""

    prompt: int
    new_tokens: int
    batch: int = 1
    ring: int = 1
    tp: int = 1
    replicate: int = 1
    weights: WeightsName = "whole"
    dtype: str = "bfloat16"

    @property
    def devices(self) -> int:
        return self.replicate * self.ring * self.tp

    @property
    def number_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def chunk(self) -> int:
        return PREFILL_TOKENS * self.ring


@dataclass(frozen=True)
class TextCost:
    """Bytes of the fullest rank and seconds of one text, lower bounds since launches are left out.

    ``weight_bytes``: shards included; ``work_bytes``: what reading a chunk adds to weights and cache; ``token_parts``:
    seconds of the last token: weights read, cache read, sent.
    """

    weight_bytes: int
    cache_bytes: int
    work_bytes: int
    first_token_seconds: float
    exposed_seconds: float
    token_parts: dict[str, float]
    collectives_per_token: int
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.work_bytes

    @property
    def token_seconds(self) -> float:
        return sum(self.token_parts.values())


def text_bytes(shape: ModelShape, text: Text) -> tuple[int, int, int]:
    """Return the bytes of weights, cache and reading a chunk, on the fullest rank.

    Whole weights are copies besides FSDP's shards. A chunk: the residual stream, its norm and sum, and the largest of
    all attention and feed-forwards.
    """
    local, a = shape.split(text.tp), text.number_bytes
    mine = a * local.parameters // text.ring
    gathered = a * (
        local.parameters
        if text.weights == "whole"
        else local.root + 2 * local.layer_parameters
    )
    weights = mine + (gathered if text.ring > 1 else 0)
    # The last new token is not cached, as no token follows it.
    kinds, written = (
        local.counted(local.layers),
        text.new_tokens - 1,
    )
    numbers = sum(
        count * cached_numbers(text, kind, text.prompt, written)
        for kind, count in kinds.items()
    )

    here = text.batch * min(
        text.prompt if text.ring == 1 else -(-text.prompt // text.ring), PREFILL_TOKENS
    )
    stream = here * 3 * a * shape.hidden * shape.streams
    widest = max(
        max(_attention_bytes(text, kind, here), here * a * _wide(shape, kind))
        for kind in kinds
    )
    return weights, a * text.batch * numbers, int(stream + widest)


def cached_numbers(text: Text, kind: LayerKind, read: int, written: int) -> int:
    """Return the numbers that the fullest rank caches per sequence and layer: keys and values, or latents.

    With an index also its keys, or the entries that it chooses among, and the last tokens, which new entries will
    pool.
    """
    index, tokens = kind.index, read + written
    found = kind.cached * _held(text, kind, read, written)
    if index is None:
        return found
    last, inputs = index.tail
    if not last:
        return found + round(index.key) * _fullest(text, read, written, None)
    # Entries are dealt in turn, and one is counted as soon as it begins.
    entries = -(-tokens // (index.size * text.ring))
    numbers = round(index.size * (index.token if index.window else index.key))
    return found + entries * numbers + min(last, tokens) * inputs


def _held(text: Text, kind: LayerKind, read: int, written: int) -> int:
    """Return the fullest rank's tokens of a layer, without those that no later query sees."""
    return _fullest(text, read, written, kind.mask.earlier)


def _attention_bytes(text: Text, kind: LayerKind, here: int) -> float:
    """Return attention's bytes: q, k, v, results, sums or scores, and keys being fetched, moved, expanded or sent."""
    a, index, written = text.number_bytes, kind.index, text.new_tokens - 1
    keys, results = (
        kind.kv_heads * (kind.head_dim + kind.value_dim),
        kind.heads * kind.value_dim,
    )
    partial = _FLOAT32 * (results + kind.heads)
    queries = a * kind.heads * kind.head_dim
    tokens = text.batch * _held(text, kind, text.prompt, written)
    rows = tokens * (kind.cached // 2)
    if kind.latent:  # the expanded product, and the keys copied from it
        rows += tokens * kind.heads * (2 * kind.head_dim - kind.rotary + kind.value_dim)
    if index:
        rows += round(text.batch * text.prompt * (index.token + index.key))
    scores = sent = 0.0
    if index and index.scored:
        scores = (_FLOAT32 + _CANDIDATE) * min(
            here * text.prompt / index.size, SCORES_AT_ONCE
        )
    if text.ring > 1 and not (index and not index.window):
        sent = min(2 * tokens * keys * a, 2 * here * (queries + partial))
    return (
        here * queries
        + max(here * (a * (results + keys) + partial), scores)
        + a * rows
        + sent
    )


def _wide(shape: ModelShape, kind: LayerKind) -> int:
    """Return a token's numbers in a feed-forward; experts take copies, and their results are weighted and sorted."""
    copies = round(kind.chosen * kind.experts[0]) * shape.hidden
    return max((4 if copies else 3) * kind.intermediate + copies, 4 * copies)


def _fullest(text: Text, read: int, written: int, window: int | None) -> int:
    """Return the tokens of a layer that the fullest rank caches, with a window only its last ones.

    Reading a prompt shares it evenly; new tokens are dealt in blocks.
    """
    if text.ring == 1:
        return min(read + written, read + written if window is None else window)
    seen = written if window is None else min(written, window)
    blocks = min(seen, -(-seen // (BLOCK_TOKENS * text.ring)) * BLOCK_TOKENS)
    if window is None:
        return -(-read // text.ring) + blocks
    last = read % text.chunk or min(read, text.chunk)
    return (
        _of_window(
            text.ring, min(read - last, text.chunk), last, min(window - seen, read)
        )
        + blocks
    )


@lru_cache(maxsize=1024)
def _of_window(ring: int, before: int, last: int, window: int) -> int:
    """Return how many of the last ``window`` tokens one rank has at most, after reading the last two chunks."""
    shares = Shares(ring)
    for count in (before, last):
        if count:
            (shares.split if is_split(count, ring) else shares.deal)(count)
    return max(shares.counts(max(0, shares.length - window)))


def text_cost(shape: ModelShape, text: Text, device: Device) -> TextCost:
    """Return the cost of a prompt and its new tokens; the last token costs most, and the mean stands for all."""
    times = _Times(shape, text, device)
    first, exposed = times.reading()
    parts = times.writing(text.prompt)
    last = times.writing(text.prompt + max(text.new_tokens - 2, 0))
    more = text.new_tokens - 1
    seconds = first + more * (sum(parts.values()) + sum(last.values())) / 2
    return TextCost(
        *text_bytes(shape, text), first, exposed, last, times.collectives, seconds
    )


class _Times:
    def __init__(self, shape: ModelShape, text: Text, device: Device) -> None:
        """Count the collectives that a pass of a few tokens waits for, and the rates.

        ``few``: each kind as a few queries compute it. ``collectives``: each attention merges the ranks' results, an
        index first finds the best keys of all ranks, and the logits come last; tensor parallelism adds two sums per
        layer, and gathered weights one gather.
        """
        self.text, self.device, self.shape = text, device, shape.split(text.tp)
        # A layer that takes an earlier one's keys reads them like its own.
        self.kinds = Counter(
            replace(kind, caches=max(1, kind.caches)) for kind in self.shape.kinds
        )
        self.few = {kind: self._seen_by_few(kind) for kind in self.kinds}
        # Peak numbers are for half precision; float32 runs as TF32 at about half of it, at best.
        self.peak = device.flops if text.number_bytes < _FLOAT32 else device.flops / 2
        inside = text.ring * text.tp <= device.devices_per_node
        self.collective = COLLECTIVE_SECONDS[inside]
        layers = shape.layers
        scores = {
            kind: kind.index is not None and kind.index.scored > 0
            for kind in self.kinds
        }
        merged = sum(
            times * kind.calls * (1 + scores[kind])
            for kind, times in self.kinds.items()
            if kind.attends
        )
        self.collectives = (merged + 1) * (text.ring > 1) + 2 * (layers + 1) * (
            text.tp > 1
        )
        self.collectives += (layers + 1) * (text.ring > 1 and text.weights == "sharded")
        self.flops = self.peak * device.attention_efficiency

    def reading(self) -> tuple[float, float]:
        """Return the seconds to the first token, and how much of that waits for links."""
        text = self.text
        seconds = exposed = 0.0
        chunks = -(-text.prompt // text.chunk)
        # With many chunks, the middle one of several neighbours stands for them.
        alike = -(-chunks // _MOST_TIMED)
        for first in range(0, chunks, alike):
            times = min(alike, chunks - first)
            start = (first + times // 2) * text.chunk
            one = self._chunk(start, min(text.chunk, text.prompt - start))
            seconds, exposed = seconds + times * one[0], exposed + times * one[1]
        return seconds + self._matrices(
            self._head, text.batch
        ) + self.collectives * self.collective, exposed

    def writing(self, held: int) -> dict[str, float]:
        """Return one token's seconds after ``held`` ones: weights read, cache read, sent."""
        text, count = self.text, self.text.batch
        weights = self._matrices(self._head + self.shape.outside, count)
        weights += sum(
            times * self._layer(kind, count) for kind, times in self.kinds.items()
        )
        cache = sum(
            times * self._few(kind, 1, held) for kind, times in self.kinds.items()
        )
        sent = self.collectives * self.collective
        if text.ring > 1:
            found = sum(
                times * self._merged_bytes(self.few[kind], held)
                for kind, times in self.kinds.items()
            )
            logits = count * self.shape.vocab * text.number_bytes
            sent += ((text.ring - 1) * found + logits) / self._bandwidth
            if text.weights == "sharded":
                weights = max(weights, self._gathered(self.shape.parameters))
        sent += self.shape.layers * self._sums(count)
        return {"weights": weights, "cache": cache, "sent": sent}

    @cached_property
    def _head(self) -> int:
        return self.shape.vocab * self.shape.hidden

    @property
    def _bandwidth(self) -> float:
        return self.device.bandwidth(self.text.ring * self.text.tp)

    def _chunk(self, start: int, count: int) -> tuple[float, float]:
        """Return all layers' seconds for ``count`` prompt tokens after ``start`` ones, and the waiting for links."""
        text = self.text
        splits = is_split(count, text.ring)
        here = text.batch * (-(-count // text.ring) if splits else count)
        seconds, exposed = self._matrices(self.shape.outside, here), 0.0
        for kind, times in self.kinds.items():
            matrices, waited, sent = self._layer(kind, here), self._sums(here), 0.0
            if text.ring > 1 and text.weights == "sharded":
                waited += max(0.0, self._gathered(kind.parameters) - matrices)
            if splits:
                computed, sent = (
                    self._computed(kind, count, start),
                    self._sent(kind, count, start),
                )
                computed += self._expanded(kind, -(-start // text.ring))
            else:
                computed = self._few(kind, count, start)
            seconds += times * (matrices + waited + max(computed, sent))
            exposed += times * (waited + max(0.0, sent - computed))
        return seconds, exposed

    def _seen_by_few(self, kind: LayerKind) -> LayerKind:
        """Return a layer as a few queries compute it: unexpanded latents are the keys and values of one head."""
        # The condition is like ``choice.sends_latents``.
        if not kind.compressed or self.text.ring == 1 or self.text.tp > 1:
            return kind
        return replace(
            kind, kv_heads=1, head_dim=kind.compressed, value_dim=kind.latent, latent=0
        )

    def _computed(self, kind: LayerKind, count: int, held: int) -> float:
        """Return a rank's seconds for its part of the pairs of ``count`` tokens and those before."""
        pairs = kind.calls * _later(partial(seen_pairs, kind), held, count)
        flops = pairs * pair_flops(self._sizes(kind), is_backward=False)
        if kind.index:
            flops += self.text.batch * _later(
                partial(scoring_flops, kind.index), held, count
            )
        return flops / self.text.ring / self.flops

    def _sizes(self, kind: LayerKind) -> Shape:
        sizes = kind.heads, kind.kv_heads, kind.head_dim, kind.value_dim
        return Shape(self.text.batch, *sizes, self.text.number_bytes)

    def _sent(self, kind: LayerKind, count: int, held: int) -> float:
        """Count a rank's received bytes for split new tokens: keys and values, or queries and results if fewer.

        With an index all that they see is fetched.
        """
        text, index, shape = self.text, kind.index, self._sizes(kind)
        seen = kind.mask.earlier
        length = count + (held if seen is None else min(held, seen))
        keys = -(-length // text.ring) * kind.calls * shape.kv_numbers * shape.itemsize
        result = shape.batch * shape.heads * (shape.value_dim + 1) * shape.sum_itemsize
        queries = -(-count // text.ring) * kind.calls * (shape.query_bytes + result)
        sent = 0.0 if index and not index.window else min(keys, queries)
        if index:
            sent += (
                -(-(count + held) // text.ring)
                * text.batch
                * text.number_bytes
                * (index.token + index.key)
            )
        return (text.ring - 1) * sent / self._bandwidth

    def _merged_bytes(self, kind: LayerKind, held: int) -> int:
        """Return the bytes that each rank hands to all for a token: its results, and the best keys of its share."""
        found, index = (
            kind.calls * kind.heads * (kind.value_dim + 1) * _FLOAT32,
            kind.index,
        )
        if index and index.scored:
            entries, blocks = (
                held // index.size,
                index.kept // (index.topk * index.size),
            )
            # A block's score needs its best key on any rank, so all are sent; of keys and pools only the best are.
            is_of_blocks = index.keys > 1 and not index.tail[0]
            found += (
                _FLOAT32 * blocks * entries
                if is_of_blocks
                else _CANDIDATE * min(entries, index.topk)
            )
        return self.text.batch * found

    def _layer(self, kind: LayerKind, tokens: int) -> float:
        """Return the seconds of a layer's products; weights of experts are read if any token is sent to them."""
        others = 1 - kind.chosen
        more = kind.experts[1] * (others - others**tokens)
        return self._matrices(kind.matrices, tokens, more)

    def _matrices(self, weights: float, tokens: float, more: float = 0.0) -> float:
        """Return the seconds of multiplying tokens with weights that are read once, as are ``more``."""
        computed = 2.0 * weights * tokens / (self.peak * self.device.matmul_efficiency)
        return max(
            computed,
            (weights + more) * self.text.number_bytes / self.device.memory_bandwidth,
        )

    def _few(self, kind: LayerKind, count: int, held: int) -> float:
        """Return a layer's attention seconds for a few tokens, each rank with its own share of the cache."""
        text, seen, read = self.text, self.few[kind], min(held, self.text.prompt)
        numbers, share = (
            f(text, kind, read, held + count - read) for f in (cached_numbers, _held)
        )
        computed = self._computed(seen, count, held)
        if seen.latent:  # expanded keys and values are written and read
            numbers += (
                2 * share * kind.calls * kind.heads * (kind.head_dim + kind.value_dim)
            )
            computed += self._expanded(kind, share)
        return max(
            computed,
            text.batch * numbers * text.number_bytes / self.device.memory_bandwidth,
        )

    def _expanded(self, kind: LayerKind, tokens: int) -> float:
        """Return the seconds of turning a sequence's cached latents into keys and values."""
        return (
            kind.calls * self._matrices(kind.expansion, self.text.batch * tokens)
            if kind.latent
            else 0.0
        )

    def _gathered(self, parameters: int) -> float:
        return (
            parameters
            * self.text.number_bytes
            * (1 - 1 / self.text.ring)
            / self._bandwidth
        )

    def _sums(self, tokens: int) -> float:
        hidden = tokens * self.shape.hidden * self.text.number_bytes
        return (
            2
            * 2
            * (1 - 1 / self.text.tp)
            * hidden
            / self.device.bandwidth(self.text.tp)
        )


def _later(count: Callable[[int], float], held: int, more: int) -> float:
    """Return how much ``more`` tokens add to a count of the first ``held`` ones."""
    return count(held + more) - (count(held) if held else 0)
