"""Bytes and seconds of a prompt read over a ring, and of each token after it.

B prompts of a replica, n new tokens, C hidden size, H, G heads, D head size, V vocabulary, N ranks of the ring, P of
tensor parallelism.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from ringspan.core.arguments import PREFILL_TOKENS, is_split
from ringspan.core.geometry.shares import BLOCK_TOKENS, Shares
from ringspan.core.names import WeightsName
from ringspan.core.schedule.timing import pair_flops
from ringspan.core.schedule.workspace import Shape
from ringspan.plan.cluster.devices import Device
from ringspan.plan.cost.passes import causal_pairs
from ringspan.plan.cost.setting import dtype_bytes
from ringspan.plan.model.shapes import ModelShape

# What a collective of a few bytes takes, inside a node and between nodes: no table has it, and of a token it is what
# a ring costs. An assumption about NCCL; measure yours.
COLLECTIVE_SECONDS: Final = {True: 20e-6, False: 40e-6}
_FLOAT32: Final = 4
_MOST_TIMED: Final = 64  # chunks of a prompt


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

    Whole weights are copies besides FSDP's shards. A chunk: the residual stream, its norm and sum, and the larger of
    attention (q, k, v, result with float32 sums, transit, one layer's moving keys) and feed-forward.
    """
    local, a = shape.split(text.tp), text.number_bytes
    mine = a * local.parameters // text.ring
    gathered = a * (local.parameters if text.weights == "whole" else local.root + 2 * local.layer_parameters)
    weights = mine + (gathered if text.ring > 1 else 0)
    # Nothing follows the last token, so it is not kept.
    tokens = [_fullest(text, text.prompt, text.new_tokens - 1, window) for window in local.layer_windows]
    kind = local.attention
    queries, keys = kind.heads * kind.head_dim, 2 * kind.kv_heads * kind.head_dim
    cache = sum(keys * a * text.batch * held for held in tokens)

    here = text.batch * min(text.prompt if text.ring == 1 else -(-text.prompt // text.ring), PREFILL_TOKENS)
    stream = 3 * a * shape.hidden
    partial = _FLOAT32 * (queries + kind.heads)
    sent = 0
    if text.ring > 1:
        whole = text.batch * max(tokens) * keys * a / max(here, 1)
        sent = min(2 * whole, 2 * (a * queries + partial))
    moved = text.batch * max(tokens) * keys // 2 * a
    attention = here * (a * (2 * queries + keys) + partial + sent) + moved
    feedforward = here * a * 3 * local.intermediate
    return weights, cache, int(here * stream + max(attention, feedforward))


def _fullest(text: Text, read: int, written: int, window: int | None) -> int:
    """Return the fullest rank's tokens of a layer: reading shares evenly, writing deals blocks, windows come last."""
    if text.ring == 1:
        return min(read + written, window or read + written)
    seen = min(written, window or written)
    blocks = min(seen, -(-seen // (BLOCK_TOKENS * text.ring)) * BLOCK_TOKENS)
    if window is None:
        return -(-read // text.ring) + blocks
    last = read % text.chunk or min(read, text.chunk)
    return _of_window(text.ring, min(read - last, text.chunk), last, min(window - seen, read)) + blocks


@lru_cache(maxsize=1024)
def _of_window(ring: int, before: int, last: int, window: int) -> int:
    """Return a rank's most of the last ``window`` tokens, after reading the last two chunks."""
    shares = Shares(ring)
    for count in (before, last):
        if count:
            (shares.split if is_split(count, ring) else shares.deal)(count)
    return max(shares.counts(max(0, shares.length - window)))


def text_cost(shape: ModelShape, text: Text, device: Device) -> TextCost:
    times = _Times(shape, text, device)
    first, exposed = times.reading()
    parts = times.writing(text.prompt)
    last = times.writing(text.prompt + max(text.new_tokens - 2, 0))
    more = text.new_tokens - 1
    seconds = first + more * (sum(parts.values()) + sum(last.values())) / 2
    return TextCost(*text_bytes(shape, text), first, exposed, last, times.collectives, seconds)


class _Times:
    def __init__(self, shape: ModelShape, text: Text, device: Device) -> None:
        self.text, self.device, self.shape = text, device, shape.split(text.tp)
        self.windows = Counter(self.shape.layer_windows)
        # Peak numbers are for half precision; float32 runs as TF32 at about half of it, at best.
        self.peak = device.flops if text.number_bytes < _FLOAT32 else device.flops / 2
        inside = text.ring * text.tp <= device.devices_per_node
        self.collective = COLLECTIVE_SECONDS[inside]
        layers = shape.layers
        self.collectives = (layers + 1) * (text.ring > 1) + 2 * (layers + 1) * (text.tp > 1)
        self.collectives += (layers + 1) * (text.ring > 1 and text.weights == "sharded")
        kind = self.shape.attention
        self.attention = Shape(text.batch, kind.heads, kind.kv_heads, kind.head_dim, kind.head_dim, text.number_bytes)
        self.flops = self.peak * device.attention_efficiency

    def reading(self) -> tuple[float, float]:
        """Return the seconds to the first token, and of these the waiting for links."""
        text = self.text
        seconds = exposed = 0.0
        chunks = -(-text.prompt // text.chunk)
        alike = -(-chunks // _MOST_TIMED)  # neighbours, of which the middle one stands for all
        for first in range(0, chunks, alike):
            times = min(alike, chunks - first)
            start = (first + times // 2) * text.chunk
            one = self._chunk(start, min(text.chunk, text.prompt - start))
            seconds, exposed = seconds + times * one[0], exposed + times * one[1]
        return seconds + self._matrices(self._head, text.batch) + self.collectives * self.collective, exposed

    def writing(self, held: int) -> dict[str, float]:
        """Return one token's seconds after ``held`` ones: weights read, cache read, sent."""
        text, count = self.text, self.text.batch
        weights = self.shape.layers * self._matrices(self.shape.layer_matrix_parameters, count)
        weights += self._matrices(self._head, count)
        cache = sum(times * self._few(1, held, window) for window, times in self.windows.items())
        sent = self.collectives * self.collective
        if text.ring > 1:
            partial = count * self.attention.heads * (self.attention.head_dim + 1) * _FLOAT32
            logits = count * self.shape.vocab * text.number_bytes
            sent += (self.shape.layers * (text.ring - 1) * partial + logits) / self._bandwidth
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
        matrices = self._matrices(self.shape.layer_matrix_parameters, here)
        waited = self._sums(here)
        if text.ring > 1 and text.weights == "sharded":
            waited += max(0.0, self._gathered(self.shape.layer_parameters) - matrices)
        seconds = self.shape.layers * (matrices + waited)
        exposed = self.shape.layers * waited
        for window, times in self.windows.items():
            computed = self._few(count, start, window) if not splits else self._computed(count, start, window)
            sent = self._sent(count, start, window) if splits else 0.0
            seconds += times * max(computed, sent)
            exposed += times * max(0.0, sent - computed)
        return seconds, exposed

    def _computed(self, count: int, held: int, window: int | None) -> float:
        pairs = causal_pairs(held + count, window) - causal_pairs(held, window)
        return pairs / self.text.ring * pair_flops(self.attention, is_backward=False) / self.flops

    def _sent(self, count: int, held: int, window: int | None) -> float:
        """Count a rank's received bytes for split new tokens: keys and values, or queries and results if fewer."""
        others, shape = self.text.ring - 1, self.attention
        length = count + held if window is None else count + min(held, window - 1)
        keys = -(-length // self.text.ring) * shape.kv_numbers * shape.itemsize
        result = shape.batch * shape.heads * (shape.value_dim + 1) * shape.sum_itemsize
        queries = -(-count // self.text.ring) * (shape.query_bytes + result)
        return others * min(keys, queries) / self._bandwidth

    def _matrices(self, weights: float, tokens: int) -> float:
        """Return the seconds of multiplying tokens with weights that are read once."""
        computed = 2.0 * weights * tokens / (self.peak * self.device.matmul_efficiency)
        return max(computed, weights * self.text.number_bytes / self.device.memory_bandwidth)

    def _few(self, count: int, held: int, window: int | None) -> float:
        """Return a layer's attention seconds for a few tokens, computed by every rank over its own share."""
        length, read = held + count, min(held, self.text.prompt)
        share = _fullest(self.text, read, length - read, window)
        of_cache = share * self.attention.kv_numbers * self.text.number_bytes
        return max(self._computed(count, held, window), of_cache / self.device.memory_bandwidth)

    def _gathered(self, parameters: int) -> float:
        return parameters * self.text.number_bytes * (1 - 1 / self.text.ring) / self._bandwidth

    def _sums(self, tokens: int) -> float:
        hidden = tokens * self.shape.hidden * self.text.number_bytes
        return 2 * 2 * (1 - 1 / self.text.tp) * hidden / self.device.bandwidth(self.text.tp)
