"""Attention of a hop's tiles in one launch, added to a running result, in Triton. Importing it needs Triton.

FlashAttention (Dao et al. 2022) that starts from the running (out, lse): no pass merges partials, and sums stay in
float32. B batch, H query heads, G key/value heads, P = H / G, R rows, K keys, D head size, E value head size. A tile is
rows [q0, q1), keys [k0, k1), and the band lo <= i - j <= hi from its corner; ``tiles``, ``first`` and ``which`` are a
``Table``'s. Old values and result may be one array: then, with IN_PLACE, rows and keys without a tile stay.
"""
# Triton compiles these functions; as Python they would not pass a type check.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from ringspan.gpu.support import OF_BATCH, OF_ROWS

# The hardware's exponential is 2 ** x, so scores are kept in units of log 2.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def scores(
    product,
    query_position,
    key_position,
    slope,
    scale,
    softcap,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Return s, factor, derivative: scores are ``s factor`` in units of log 2; ``derivative`` by scaled product."""
    # The factor is left to the exponential, which multiplies by it in the same operation.
    s, factor, derivative = product, scale * LOG2_E, 1.0
    if HAS_CAP:
        s = _tanh(product * (scale / softcap))
        factor, derivative = softcap * LOG2_E, 1.0 - s * s
    if HAS_SLOPES:
        s = s * factor - slope * LOG2_E * tl.abs(query_position - key_position).to(
            tl.float32
        )
        factor = 1.0
    return s, factor, derivative


@triton.jit
def tile_at(tiles, number):
    at = tiles + 6 * number
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
    )


@triton.jit
def segments(first, q0, q1, k0, k1, lo, hi, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return a tile's keys that the rows [first, first + ROWS) see: start, a, b, stop, from its corner."""
    # Blocks of KEYS in [start, a) and [b, stop) need the mask; in [a, b) all their pairs are allowed.
    # For the rows that see given keys, exchange rows and keys, and pass -hi and -lo as the bounds.
    high, low = tl.maximum(first, q0) - q0, tl.minimum(first + ROWS, q1) - 1 - q0
    start, stop = tl.maximum(0, high - hi), tl.minimum(k1 - k0, low - lo + 1)
    stop = tl.where(low >= high, stop, start)
    all_from, all_to = low - hi, tl.minimum(k1 - k0, high - lo + 1)
    a = start + tl.cdiv(tl.maximum(all_from - start, 0), KEYS) * KEYS
    b = start + tl.maximum(all_to - start, 0) // KEYS * KEYS
    has_inside = (first >= q0) & (first + ROWS <= q1) & (b > a)
    return start, tl.where(has_inside, a, start), tl.where(has_inside, b, start), stop


@triton.jit
def _load(
    pointer, at, stride, local, column, is_row, size, MASKED: tl.constexpr = True
):
    """Load rows of a head, padded with 0: (rows, numbers)."""
    places = pointer + at * stride + local[:, None] * stride + column[None, :]
    if MASKED:
        return tl.load(
            places, mask=is_row[:, None] & (column < size)[None, :], other=0.0
        )
    else:
        return tl.load(places)


@triton.jit
def _load_transposed(
    pointer, at, stride, local, column, is_row, size, MASKED: tl.constexpr
):
    """Load rows of a head, padded with 0: (numbers, rows)."""
    places = pointer + at * stride + local[None, :] * stride + column[:, None]
    if MASKED:
        return tl.load(
            places, mask=is_row[None, :] & (column < size)[:, None], other=0.0
        )
    else:
        return tl.load(places)


@triton.jit
def _see(
    acc, top, total, q, k, v, k_t, v_t, row, rows_in, position, key_positions, slope, scale, softcap, k0, lo, hi,
    start, stop, last, size, value_size,
    KEYS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, MASKED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, PRECISION: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Add the keys [start, stop) of a tile, in blocks, to a block of rows' sums."""
    column, value_column = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    PADDED: tl.constexpr = MASKED or not IS_EVEN
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        is_key = key < last
        at = (k0 + first).to(tl.int64)
        local = tl.arange(0, KEYS)
        keys = _load_transposed(k, at, k_t, local, column, is_key, size, PADDED)
        key_position = 0
        if HAS_SLOPES:
            key_position = tl.load(key_positions + k0 + key, mask=is_key, other=0)[
                None, :
            ]
        s, factor, _ = scores(
            tl.dot(q, keys, input_precision=PRECISION),
            position,
            key_position,
            slope,
            scale,
            softcap,
            HAS_CAP,
            HAS_SLOPES,
        )
        if MASKED:
            distance = row[:, None] - key[None, :]
            is_seen = (
                (distance >= lo) & (distance <= hi) & rows_in[:, None] & is_key[None, :]
            )
            s, factor = tl.where(is_seen, s * factor, -float("inf")), 1.0
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        kept = tl.exp2(top - base)
        p = tl.exp2(s * factor - base[:, None])
        values = _load(v, at, v_t, local, value_column, is_key, value_size, PADDED)
        acc = tl.dot(
            p.to(values.dtype), values, acc * kept[:, None], input_precision=PRECISION
        )
        total = total * kept + tl.sum(p, 1)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=OF_BATCH, do_not_specialize_on_alignment=OF_ROWS)
def forward(
    q, k, v, old_out, old_lse, slopes, query_positions, key_positions, tiles, first, which,
    heads, group, rows, size, value_size, scale, softcap, bucket,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, lse_b, lse_h, lse_t,
    out, lse,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr, IS_EVEN: tl.constexpr, GRAIN: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Add the tiles' keys to the rows' running (out, lse): float32, (B, H, R, E) and (B, H, R)."""
    # Start with the last rows, since they see the most keys of a causal tile.
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    entry, last_entry = (
        tl.load(first + row0 // GRAIN),
        tl.load(first + row0 // GRAIN + 1),
    )
    if (entry == last_entry) & IN_PLACE:
        return
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    local, column, value_column = (
        tl.arange(0, ROWS),
        tl.arange(0, SIZE),
        tl.arange(0, VALUE_SIZE),
    )
    row = row0 + local
    is_row = row < rows
    at, head64, kv_head = (
        row0.to(tl.int64),
        head.to(tl.int64),
        (head // group).to(tl.int64),
    )
    is_out = is_row[:, None] & (value_column < value_size)[None, :]
    queries = _load(
        q + batch * q_b + head64 * q_h, at, q_t, local, column, is_row, size
    )
    out_at = (
        batch * out_b
        + head64 * out_h
        + at * out_t
        + local[:, None] * out_t
        + value_column[None, :]
    )
    lse_at = batch * lse_b + head64 * lse_h + at * lse_t + local * lse_t
    # With a positive scale the largest score comes from the largest product.
    queries, scale = tl.where(scale < 0, -queries, queries), tl.abs(scale)
    before = tl.load(old_lse + lse_at, mask=is_row, other=-float("inf"))
    acc = tl.load(old_out + out_at, mask=is_out, other=0.0)
    top = before * LOG2_E
    total = tl.where(before == -float("inf"), 0.0, 1.0)
    old_top, slope, position = top, 0.0, 0
    if HAS_SLOPES:
        slope = tl.load(slopes + head)
        position = tl.load(query_positions + row, mask=is_row, other=0)[:, None]
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    for number in range(entry, last_entry):
        q0, q1, k0, k1, lo, hi = tile_at(tiles, tl.load(which + number))
        bounds = segments(row0, q0, q1, k0, k1, lo, hi, ROWS, KEYS)
        rows_in = (row >= q0) & (row < q1)
        for part in tl.static_range(3):
            acc, top, total = _see(
                acc,
                top,
                total,
                queries,
                k,
                v,
                k_t,
                v_t,
                row - q0,
                rows_in,
                position,
                key_positions,
                slope,
                scale,
                softcap,
                k0,
                lo,
                hi,
                bounds[part],
                bounds[part + 1],
                k1 - k0,
                size,
                value_size,
                KEYS,
                SIZE,
                VALUE_SIZE,
                part != 1,
                HAS_CAP,
                HAS_SLOPES,
                PRECISION,
                IS_EVEN,
            )
    has_seen = total > 0.0
    divisor = tl.where(has_seen, total, 1.0)
    new_lse = tl.where(has_seen, (top + tl.log2(divisor)) * LN_2, -float("inf"))
    # An unchanged lse is stored as it was, as converting it to base 2 and back would round.
    is_unchanged = (top == old_top) & (total == 1.0)
    tl.store(out + out_at, acc / divisor[:, None], mask=is_out)
    tl.store(lse + lse_at, tl.where(is_unchanged, before, new_lse), mask=is_row)


@triton.jit
def _pull(
    acc, q, dout, lse2, delta, k, v, k_t, v_t, row, rows_in, position, key_positions, slope, scale, softcap, k0, lo,
    hi, start, stop, last, size, value_size,
    KEYS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, MASKED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, PRECISION: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Add what the keys [start, stop) of a tile contribute to dq / scale of a block of rows."""
    column, value_column, local = (
        tl.arange(0, SIZE),
        tl.arange(0, VALUE_SIZE),
        tl.arange(0, KEYS),
    )
    PADDED: tl.constexpr = MASKED or not IS_EVEN
    for first in range(start, stop, KEYS):
        key = first + local
        is_key = key < last
        at = (k0 + first).to(tl.int64)
        keys = _load_transposed(k, at, k_t, local, column, is_key, size, PADDED)
        values = _load_transposed(
            v, at, v_t, local, value_column, is_key, value_size, PADDED
        )
        key_position = 0
        if HAS_SLOPES:
            key_position = tl.load(key_positions + k0 + key, mask=is_key, other=0)[
                None, :
            ]
        s, factor, derivative = scores(
            tl.dot(q, keys, input_precision=PRECISION),
            position,
            key_position,
            slope,
            scale,
            softcap,
            HAS_CAP,
            HAS_SLOPES,
        )
        p = tl.exp2(s * factor - lse2[:, None])
        if MASKED:
            distance = row[:, None] - key[None, :]
            p = tl.where(
                (distance >= lo)
                & (distance <= hi)
                & rows_in[:, None]
                & is_key[None, :],
                p,
                0.0,
            )
        dp = tl.dot(dout, values, input_precision=PRECISION)
        ds = p * (dp - delta[:, None]) * derivative
        acc = tl.dot(ds.to(keys.dtype), tl.trans(keys), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=OF_BATCH, do_not_specialize_on_alignment=OF_ROWS)
def backward_queries(
    dout, q, k, v, out, lse, delta_at, old_dq, slopes, query_positions, key_positions, tiles, first, which,
    heads, group, rows, size, value_size, scale, softcap, bucket,
    dout_b, dout_h, dout_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, lse_b, lse_h, lse_t,
    dq_b, dq_h, dq_t,
    dq,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr, IS_EVEN: tl.constexpr, GRAIN: tl.constexpr, IN_PLACE: tl.constexpr,
    HAS_DELTA: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the tiles' share of dq, (B, H, R, D) float32, from the GLOBAL out and lse."""
    # delta = sum(dout out), (B, H, R) without gaps, is read if HAS_DELTA, else computed, for ``backward_keys``.
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    entry, last_entry = (
        tl.load(first + row0 // GRAIN),
        tl.load(first + row0 // GRAIN + 1),
    )
    if (entry == last_entry) & IN_PLACE:
        return
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    local, column, value_column = (
        tl.arange(0, ROWS),
        tl.arange(0, SIZE),
        tl.arange(0, VALUE_SIZE),
    )
    row = row0 + local
    is_row = row < rows
    at, head64, kv_head = (
        row0.to(tl.int64),
        head.to(tl.int64),
        (head // group).to(tl.int64),
    )
    is_q = is_row[:, None] & (column < size)[None, :]
    queries = _load(
        q + batch * q_b + head64 * q_h, at, q_t, local, column, is_row, size
    )
    douts = _load(
        dout + batch * dout_b + head64 * dout_h,
        at,
        dout_t,
        local,
        value_column,
        is_row,
        value_size,
    )
    delta_at += tl.program_id(1).to(tl.int64) * rows + row
    if HAS_DELTA:
        delta = tl.load(delta_at, mask=is_row, other=0.0)
    else:
        outs = _load(
            out + batch * out_b + head64 * out_h,
            at,
            out_t,
            local,
            value_column,
            is_row,
            value_size,
        )
        delta = tl.sum(douts.to(tl.float32) * outs.to(tl.float32), 1)
        tl.store(delta_at, delta, mask=is_row)
    row_lse = tl.load(
        lse + batch * lse_b + head64 * lse_h + at * lse_t + local * lse_t,
        mask=is_row,
        other=0.0,
    )
    # A row that saw no key has lse -inf; with +inf instead its probabilities become 0.
    lse2 = tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2_E)
    slope, position = 0.0, 0
    if HAS_SLOPES:
        slope = tl.load(slopes + head)
        position = tl.load(query_positions + row, mask=is_row, other=0)[:, None]
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for number in range(entry, last_entry):
        q0, q1, k0, k1, lo, hi = tile_at(tiles, tl.load(which + number))
        bounds = segments(row0, q0, q1, k0, k1, lo, hi, ROWS, KEYS)
        rows_in = (row >= q0) & (row < q1)
        for part in tl.static_range(3):
            acc = _pull(
                acc,
                queries,
                douts,
                lse2,
                delta,
                k,
                v,
                k_t,
                v_t,
                row - q0,
                rows_in,
                position,
                key_positions,
                slope,
                scale,
                softcap,
                k0,
                lo,
                hi,
                bounds[part],
                bounds[part + 1],
                k1 - k0,
                size,
                value_size,
                KEYS,
                SIZE,
                VALUE_SIZE,
                part != 1,
                HAS_CAP,
                HAS_SLOPES,
                PRECISION,
                IS_EVEN,
            )
    dq_at = (
        batch * dq_b
        + head64 * dq_h
        + at * dq_t
        + local[:, None] * dq_t
        + column[None, :]
    )
    tl.store(
        dq + dq_at,
        tl.load(old_dq + dq_at, mask=is_q, other=0.0) + acc * scale,
        mask=is_q,
    )


@triton.jit
def _push(
    dk, dv, keys, values, q, dout, lse, delta, q_t, dout_t, lse_t, key, keys_in, query_positions, key_position, slope,
    scale, softcap, q0, lo, hi, start, stop, last, size, value_size,
    ROWS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, MASKED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, PRECISION: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Add what the rows [start, stop) of a tile contribute to dk / scale and dv of a block of keys."""
    column, value_column, local = (
        tl.arange(0, SIZE),
        tl.arange(0, VALUE_SIZE),
        tl.arange(0, ROWS),
    )
    PADDED: tl.constexpr = MASKED or not IS_EVEN
    for first in range(start, stop, ROWS):
        row = first + local
        is_row = row < last
        at = (q0 + first).to(tl.int64)
        queries = _load_transposed(q, at, q_t, local, column, is_row, size, PADDED)
        douts = _load(dout, at, dout_t, local, value_column, is_row, value_size, PADDED)
        row_lse = tl.load(lse + at * lse_t + local * lse_t, mask=is_row, other=0.0)
        lse2 = tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2_E)
        deltas = tl.load(delta + at + local, mask=is_row, other=0.0)
        position = 0
        if HAS_SLOPES:
            position = tl.load(query_positions + q0 + row, mask=is_row, other=0)[
                None, :
            ]
        s, factor, derivative = scores(
            tl.dot(keys, queries, input_precision=PRECISION),
            position,
            key_position,
            slope,
            scale,
            softcap,
            HAS_CAP,
            HAS_SLOPES,
        )
        p = tl.exp2(s * factor - lse2[None, :])
        if MASKED:
            distance = row[None, :] - key[:, None]
            p = tl.where(
                (distance >= lo)
                & (distance <= hi)
                & keys_in[:, None]
                & is_row[None, :],
                p,
                0.0,
            )
        dv = tl.dot(p.to(douts.dtype), douts, dv, input_precision=PRECISION)
        dp = tl.dot(values, tl.trans(douts), input_precision=PRECISION)
        ds = p * (dp - deltas[None, :]) * derivative
        dk = tl.dot(
            ds.to(queries.dtype), tl.trans(queries), dk, input_precision=PRECISION
        )
    return dk, dv


@triton.jit(do_not_specialize=OF_BATCH, do_not_specialize_on_alignment=OF_ROWS)
def backward_keys(
    dout, q, k, v, lse, delta, old_dk, old_dv, slopes, query_positions, key_positions, tiles, first, which,
    heads, group, rows, num_keys, size, value_size, scale, softcap, bucket,
    dout_b, dout_h, dout_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, lse_b, lse_h, lse_t, dk_b, dk_h, dk_t,
    dv_b, dv_h, dv_t,
    dk, dv,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr, IS_EVEN: tl.constexpr, GRAIN: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the tiles' share of dk (B, G, K, D) and dv (B, G, K, E), float32."""
    # One program sums a block of keys over its group's query heads: no atomic adds, so results repeat.
    # Start with the first keys, since most rows of a causal tile see them.
    key_start = tl.program_id(0) * KEYS
    entry, last_entry = (
        tl.load(first + key_start // GRAIN),
        tl.load(first + key_start // GRAIN + 1),
    )
    if (entry == last_entry) & IN_PLACE:
        return
    groups = heads // group
    batch, kv_head = (
        (tl.program_id(1) // groups).to(tl.int64),
        tl.program_id(1) % groups,
    )
    local, column, value_column = (
        tl.arange(0, KEYS),
        tl.arange(0, SIZE),
        tl.arange(0, VALUE_SIZE),
    )
    key = key_start + local
    is_key = key < num_keys
    at, kv_head64 = key_start.to(tl.int64), kv_head.to(tl.int64)
    is_k, is_v = (
        is_key[:, None] & (column < size)[None, :],
        is_key[:, None] & (value_column < value_size)[None, :],
    )
    keys = _load(
        k + batch * k_b + kv_head64 * k_h, at, k_t, local, column, is_key, size
    )
    values = _load(
        v + batch * v_b + kv_head64 * v_h,
        at,
        v_t,
        local,
        value_column,
        is_key,
        value_size,
    )
    dk_sum, dv_sum = (
        tl.zeros((KEYS, SIZE), tl.float32),
        tl.zeros((KEYS, VALUE_SIZE), tl.float32),
    )
    key_position = 0
    if HAS_SLOPES:
        key_position = tl.load(key_positions + key, mask=is_key, other=0)[:, None]
    for member in range(group):
        head = kv_head * group + member
        head64 = head.to(tl.int64)
        q_head, dout_head = (
            q + batch * q_b + head64 * q_h,
            dout + batch * dout_b + head64 * dout_h,
        )
        lse_head, delta_head = (
            lse + batch * lse_b + head64 * lse_h,
            delta + (batch * heads + head64) * rows,
        )
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes + head)
        for number in range(entry, last_entry):
            q0, q1, k0, k1, lo, hi = tile_at(tiles, tl.load(which + number))
            bounds = segments(key_start, k0, k1, q0, q1, -hi, -lo, KEYS, ROWS)
            keys_in = (key >= k0) & (key < k1)
            for part in tl.static_range(3):
                dk_sum, dv_sum = _push(
                    dk_sum,
                    dv_sum,
                    keys,
                    values,
                    q_head,
                    dout_head,
                    lse_head,
                    delta_head,
                    q_t,
                    dout_t,
                    lse_t,
                    key - k0,
                    keys_in,
                    query_positions,
                    key_position,
                    slope,
                    scale,
                    softcap,
                    q0,
                    lo,
                    hi,
                    bounds[part],
                    bounds[part + 1],
                    q1 - q0,
                    size,
                    value_size,
                    ROWS,
                    SIZE,
                    VALUE_SIZE,
                    part != 1,
                    HAS_CAP,
                    HAS_SLOPES,
                    PRECISION,
                    IS_EVEN,
                )
    dk_at = (
        batch * dk_b
        + kv_head64 * dk_h
        + at * dk_t
        + local[:, None] * dk_t
        + column[None, :]
    )
    dv_at = (
        batch * dv_b
        + kv_head64 * dv_h
        + at * dv_t
        + local[:, None] * dv_t
        + value_column[None, :]
    )
    tl.store(
        dk + dk_at,
        tl.load(old_dk + dk_at, mask=is_k, other=0.0) + dk_sum * scale,
        mask=is_k,
    )
    tl.store(
        dv + dv_at, tl.load(old_dv + dv_at, mask=is_v, other=0.0) + dv_sum, mask=is_v
    )
