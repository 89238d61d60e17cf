"""Formulas of a training step's cost: saved bytes, loss bytes, FLOPs. I intermediate size, s bytes per number."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from ringspan.core.names import CheckpointName

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# Rows of a low-precision weight gradient that are computed at once and then added to the float32 sum.
PRODUCT_ROWS: Final = 4096
_FLOAT32: Final = DTYPE_BYTES["float32"]


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a Llama-like decoder layer, or of one rank's share."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


def saved_bytes(
    sizes: LayerSizes, number_bytes: int, checkpoint: CheckpointName, *, layers: int = 1,
    layers_per_checkpoint: int = 1, feedforward_in_chunks: bool = False,
) -> int:  # fmt: skip
    """Return the bytes per token that ``layers`` layers keep from forward to backward.

    full        s C                                   the input, of the first of ``layers_per_checkpoint`` layers
    attention   s C + s H D + 4 H                     and, of each layer, attention's result and log-sum-exp
    none        2 (4 (C + 1) + 2 s C)                 two norms, which compute in float32
                + 2 s (H + G) D + 4 H                 queries, keys, values, result and log-sum-exp
                + 4 s I                               the gated feed-forward, unless it runs in chunks
    """
    s, outs = number_bytes, sizes.heads * sizes.head_dim
    attention = s * outs + _FLOAT32 * sizes.heads
    if checkpoint == "none":
        queries = s * (outs + 2 * sizes.kv_heads * sizes.head_dim)
        feedforward = 0 if feedforward_in_chunks else 4 * s * sizes.intermediate
        # transformers' norm keeps a copy of its input.
        norm = 2 * s * sizes.hidden + _FLOAT32 * (sizes.hidden + 1)
        return layers * (2 * norm + queries + attention + feedforward)
    inputs = -(-layers // layers_per_checkpoint)
    return s * sizes.hidden * inputs + (
        layers * attention if checkpoint == "attention" else 0
    )


class LossBytes(NamedTuple):
    """Bytes of the blockwise loss, except its arguments and the gradient of ``hidden``."""

    sums: int  # gradients of weight and bias, held as long as the loss
    block: int  # one block of logits, and what is computed from it
    # The weight's gradient in the weight's dtype, after the last block; 0 if the sum has that dtype.
    rounded: int

    @property
    def peak(self) -> int:
        return self.sums + max(self.block, self.rounded)


def loss_bytes(
    hidden: int, vocabulary: int, number_bytes: int, *, chunk_tokens: int, chunk_vocabulary: int | None = None,
    softcap: bool = False, bias: bool = False,
) -> LossBytes:  # fmt: skip
    """Return the bytes that ``ringspan.blockwise_cross_entropy`` holds, for blocks of n tokens and v entries.

    With a = max(s, 4): ``V C a`` for the weight's gradient, ``n v a`` for the logits (twice with a softcap) and, with
    several blocks of vocabulary, ``n C a`` for the gradient of hidden. Below float32 also the rounded logits' gradient
    ``n v s`` and a product of m <= 4096 weight rows or n tokens, ``m C (s + a)``, or, if more, the rounded weight's
    gradient ``V C s``. Leaves out vectors of n and what a matrix product packs: < 3% from blocks of 512 x 8192 on.
    """
    s, a = number_bytes, max(number_bytes, _FLOAT32)
    v = min(chunk_vocabulary or vocabulary, vocabulary)
    logits, several = chunk_tokens * v, v < vocabulary
    block = (2 if softcap else 1) * logits * a
    if s < a:
        block += logits * s + max(
            min(PRODUCT_ROWS, v), chunk_tokens if several else 0
        ) * hidden * (s + a)
    if several:
        block += chunk_tokens * hidden * a
    return LossBytes(
        vocabulary * (hidden + bias) * a, block, vocabulary * hidden * s if s < a else 0
    )


def training_flops(weights: float, tokens: float, query_pairs: float) -> float:
    """Return a training step's ``6 weights tokens + 12 query_pairs`` FLOPs, without recomputation."""
    # 2 FLOPs once in forward, twice in backward, per weight and per score and value of each allowed pair:
    # ``query_pairs`` are pairs x numbers in a token's query heads, of all layers.
    return 6.0 * weights * tokens + 12.0 * query_pairs
