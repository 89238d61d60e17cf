"""Shared parts of ``attention``'s kernels: scores of pairs, and the keys of a tile that rows see."""
# Triton compiles these functions; as Python they would not type.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware's exponential is 2 ** x, so scores are kept in units of log 2
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def scores(
    product, query_position, key_position, slope, scale, softcap, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):
    """Numbers, and the factor that makes scores in units of log 2 of them; their derivative by the scaled product."""
    # The factor of numbers that need nothing else is left to the exponential, which takes it in one operation.
    s, factor, derivative = product, scale * LOG2_E, 1.0
    if HAS_CAP:
        s = _tanh(product * (scale / softcap))
        factor, derivative = softcap * LOG2_E, 1.0 - s * s
    if HAS_SLOPES:
        s = s * factor - slope * LOG2_E * tl.abs(query_position - key_position).to(tl.float32)
        factor = 1.0
    return s, factor, derivative


@triton.jit
def tile_at(tiles, number):
    at = tiles + 6 * number
    return (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5))


@triton.jit
def segments(first, q0, q1, k0, k1, lo, hi, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return a tile's keys that the rows [first, first + ROWS) see: start, a, b, stop, from its corner."""
    # Blocks of KEYS in [start, a) and [b, stop) need the mask; in [a, b) all their pairs are allowed.
    # With rows and keys, and -hi and -lo, in each other's place: the rows that keys see.
    high, low = tl.maximum(first, q0) - q0, tl.minimum(first + ROWS, q1) - 1 - q0
    start, stop = tl.maximum(0, high - hi), tl.minimum(k1 - k0, low - lo + 1)
    stop = tl.where(low >= high, stop, start)
    all_from, all_to = low - hi, tl.minimum(k1 - k0, high - lo + 1)
    a = start + tl.cdiv(tl.maximum(all_from - start, 0), KEYS) * KEYS
    b = start + tl.maximum(all_to - start, 0) // KEYS * KEYS
    has_inside = (first >= q0) & (first + ROWS <= q1) & (b > a)
    return start, tl.where(has_inside, a, start), tl.where(has_inside, b, start), stop
