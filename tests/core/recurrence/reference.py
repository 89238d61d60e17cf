"""Layers with a state, token by token in float64, from a state (0 if None) to outputs and a last state.

B batch, T tokens, H heads, K key size, V value size, C channels, N state size.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """``S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T`` and ``o_t = S_t^T q_t / sqrt(K)``.

    q, k (B, T, H, K), v (B, T, H, V), beta (B, T, H); ``a = exp(log_decay)`` is one number per head (B, T, H): the
    gated delta rule (Yang et al. 2025, arXiv 2412.06464); or one per key channel (B, T, H, K): Kimi delta attention
    (Kimi Team 2025, arXiv 2510.26692). State (B, H, K, V).
    """
    batch, tokens, heads, size = k.shape
    states = (
        np.zeros((batch, heads, size, v.shape[-1]))
        if state is None
        else state.astype(np.float64)
    )
    decay = np.exp(log_decay if log_decay.ndim == 4 else log_decay[..., None])
    out = np.zeros((batch, tokens, heads, v.shape[-1]))
    for t in range(tokens):
        states = states * decay[:, t, :, :, None]
        told = np.einsum("bhk,bhkv->bhv", k[:, t], states)
        states = states + np.einsum(
            "bhk,bhv->bhkv", k[:, t], (v[:, t] - told) * beta[:, t, :, None]
        )
        out[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], states) * size**-0.5
    return out, states


def state_space_dual(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """Mamba-2: ``S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T``, ``y_t = S_t c_t + d x_t``.

    x (B, T, H, V), dt (B, T, H), a and d (H,), b and c (B, T, H, N). State (B, H, V, N). Source: Dao and Gu 2024, arXiv
    2405.21060.
    """
    batch, tokens, heads, size = x.shape
    states = (
        np.zeros((batch, heads, size, b.shape[-1]))
        if state is None
        else state.astype(np.float64)
    )
    out = np.zeros(x.shape)
    for t in range(tokens):
        decay = np.exp(a * dt[:, t])[:, :, None, None]
        states = decay * states + np.einsum(
            "bh,bhv,bhn->bhvn", dt[:, t], x[:, t], b[:, t]
        )
        out[:, t] = np.einsum("bhvn,bhn->bhv", states, c[:, t])
    return out if d is None else out + d[:, None] * x, states


def selective_scan(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """Mamba: ``s_t = exp(a dt_t) s_{t-1} + dt_t b_t x_t``, ``y_t = s_t c_t + d x_t``.

    x and dt (B, C, T), a (C, N), b and c (B, N, T), d (C,). State (B, C, N). Source: Gu and Dao 2023, arXiv 2312.00752.
    """
    batch, channels, tokens = x.shape
    states = (
        np.zeros((batch, channels, a.shape[1]))
        if state is None
        else state.astype(np.float64)
    )
    out = np.zeros(x.shape)
    for t in range(tokens):
        step = dt[:, :, t, None]
        states = np.exp(a * step) * states + step * b[:, None, :, t] * x[:, :, t, None]
        out[:, :, t] = np.einsum("bcn,bn->bc", states, c[:, :, t])
    return out if d is None else out + d[:, None] * x, states


def lightning_attention(
    q: Array, k: Array, v: Array, slopes: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """Qin et al. 2024, arXiv 2401.04658: ``S_t = exp(-slope_h) S_{t-1} + k_t v_t^T`` and ``o_t = S_t^T q_t``.

    q, k (B, H, T, K), v (B, H, T, V), slopes (H,). State (B, H, K, V).
    """
    batch, heads, tokens, size = k.shape
    states = (
        np.zeros((batch, heads, size, v.shape[-1]))
        if state is None
        else state.astype(np.float64)
    )
    decay = np.exp(-slopes)[:, None, None]
    out = np.zeros(v.shape)
    for t in range(tokens):
        states = decay * states + np.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t])
        out[:, :, t] = np.einsum("bhk,bhkv->bhv", q[:, :, t], states)
    return out, states


def causal_convolution(
    x: Array, weight: Array, bias: Array | None = None, before: Array | None = None
) -> Array:
    """``y_t = sum_i weight_i x_{t - K + 1 + i} + bias`` for each channel, with the K - 1 inputs before, 0 when None.

    x (B, C, T), weight (C, K), bias (C,), before (B, C, K - 1).
    """
    taps = weight.shape[1]
    held = np.zeros((*x.shape[:2], taps - 1)) if before is None else before
    inputs = np.concatenate((held, x), -1)
    out = sum(
        weight[:, tap, None] * inputs[:, :, tap : tap + x.shape[-1]]
        for tap in range(taps)
    )
    return np.asarray(out if bias is None else out + bias[:, None])
