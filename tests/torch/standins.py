"""What the operators of CUDA and of the flash-attn packages are documented to compute, written out densely on the CPU:
their signatures, shapes, windows, log-sum-exp and global backward, so that what calls them is tested without a GPU.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import patch

import torch
from torch.library import Library

from ringspan.gpu.support import is_installed
from ringspan.torch.engine.kernels import forget_served

OF_CUDA = ("cudnn", "flash", "flash2", "flash3", "flash4")
_CALLS: list[str] = []


def calls() -> list[str]:
    """The operators called since the last time, in order."""
    made = list(_CALLS)
    _CALLS.clear()
    return made


def _spans(q, k, cu_q, cu_k):
    """(rows of q, rows of k) of each sequence, where tokens are flattened."""
    for sequence in range(len(cu_q) - 1):
        yield (
            slice(cu_q[sequence], cu_q[sequence + 1]),
            slice(cu_k[sequence], cu_k[sequence + 1]),
        )


def _scores(q, k, scale, causal, left, right, softcap):
    """(H, T, T') scores of one sequence (T, H, D), -inf outside of the window, and d(score)/d(scale q k)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * scale
    slope = torch.ones_like(s)
    if softcap:
        s = torch.tanh(s / softcap)
        slope, s = 1 - s * s, s * softcap
    left, right = (-1 if x is None else x for x in (left, right))
    if causal:
        assert right in (-1, 0)
        right = 0
    shift = len(k) - len(q)  # the last row and the last key are beside each other
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - shift
    outside = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        outside |= distance > right
    if left >= 0:
        outside |= distance < -left
    return s.masked_fill(outside, -torch.inf), slope


def flash2_window(left, right, causal, most_keys):
    """What FlashAttention 2 makes of a window: no bound is one of ``most_keys``, and so is a larger one. With more rows
    than keys it does bind on the right: the first rows do not see the last keys.
    """
    left, right = (-1 if x is None or x >= most_keys else x for x in (left, right))
    right = 0 if causal else right
    if left < 0 <= right:
        left = most_keys
    elif right < 0 <= left:
        right = most_keys
    return {"left": left, "right": right}


def _one_forward(q, k, v, scale, causal, left, right, softcap):
    s, _ = _scores(q, k, scale, causal, left, right, softcap)
    lse = s.logsumexp(-1) if k.shape[0] else torch.full(s.shape[:-1], -torch.inf)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("hij,jhe->ihe", p, v), lse.masked_fill(
        lse == -torch.inf, torch.inf
    )


def _one_backward(dout, q, k, v, out, lse, scale, causal, left, right, softcap):
    assert (lse < torch.inf).all(), "a row that saw nothing has lse -inf here"
    s, slope = _scores(q, k, scale, causal, left, right, softcap)
    group = q.shape[1] // k.shape[1]
    p = torch.exp(s - lse[..., None]) if s.numel() else s
    p = p.nan_to_num(0.0)
    dp = torch.einsum("ihe,jhe->hij", dout, v.repeat_interleave(group, 1))
    ds = p * (dp - (dout * out).sum(-1).T[..., None]) * slope * scale
    dk = torch.einsum("hij,ihd->jhd", ds, q).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("hij,ihe->jhe", p, dout).unflatten(1, (-1, group)).sum(2)
    return torch.einsum("hij,jhd->ihd", ds, k.repeat_interleave(group, 1)), dk, dv


def _check_memory(*tensors):
    """What such kernels load at once: 16 bytes of a row, which must begin at a multiple of them; nothing expanded."""
    for x in tensors:
        starts = [
            x.data_ptr(),
            *(x.stride(n) * x.itemsize for n in range(x.ndim - 1) if x.shape[n] > 1),
        ]
        assert (
            x.stride(-1) == 1
            and all(start % 16 == 0 for start in starts)
            and 0 not in starts
        )


def flash_forward(
    q, k, v, cu_q=None, cu_k=None, *, scale, causal, left=None, right=None, softcap=0.0
):
    """(B, T, H, D) -> out and lse (B, H, T); with cuts (T, H, D) -> out and lse (H, T)."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
    _check_memory(q, k, v)
    options = scale, causal, left, right, softcap
    if cu_q is None:
        parts = [_one_forward(*one, *options) for one in zip(q, k, v, strict=True)]
        return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    assert (
        cu_q[-1] == len(q)
        and cu_k[-1] == len(k)
        and cu_q.dtype == cu_k.dtype == torch.int32
    )
    for rows, keys in _spans(q, k, cu_q, cu_k):
        out[rows], lse[:, rows] = _one_forward(q[rows], k[keys], v[keys], *options)
    return out, lse


def flash_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_q=None,
    cu_k=None,
    *,
    scale,
    causal,
    left=None,
    right=None,
    softcap=0.0,
):
    """dq, dk and dv, from the global out and lse."""
    assert lse.is_contiguous() and lse.dtype == torch.float32
    _check_memory(dout, q, k, v, out)
    options = scale, causal, left, right, softcap
    if cu_q is None:
        parts = [
            _one_backward(*one, *options)
            for one in zip(dout, q, k, v, out, lse, strict=True)
        ]
        return tuple(torch.stack([p[i] for p in parts]) for i in range(3))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in _spans(q, k, cu_q, cu_k):
        inputs = dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows]
        dq[rows], dk[keys], dv[keys] = _one_backward(*inputs, *options)
    return dq, dk, dv


# The operators of PyTorch 2.11 to 2.13. The dispatcher checks their arguments against the real schemas.


def _torch_forward(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left,
    window_size_right,
    **_,
):
    _CALLS.append("flash")
    assert not dropout and not debug
    window = flash2_window(window_size_left, window_size_right, causal, max_k)
    out, lse = flash_forward(q, k, v, cu_q, cu_k, scale=scale, causal=causal, **window)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _torch_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    *_,
    scale,
    window_size_left,
    window_size_right,
):
    _CALLS.append("flash backward")
    window = flash2_window(window_size_left, window_size_right, causal, max_k)
    return flash_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, scale=scale, causal=causal, **window
    )


def _cudnn_forward(
    q, k, v, bias, has_lse, dropout=0.0, causal=False, debug=False, *, scale=None
):
    _CALLS.append("cudnn")
    assert bias is None and has_lse and not dropout and not debug
    assert (
        q.shape[2] > 1 and k.shape[2] > 1 and (not causal or q.shape[2] == k.shape[2])
    )
    out, lse = flash_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), scale=scale, causal=causal
    )
    state, nothing = torch.empty((), dtype=torch.int64), torch.empty(0)
    return (
        out.transpose(1, 2),
        lse.unsqueeze(-1),
        nothing,
        nothing,
        0,
        0,
        state,
        state,
        nothing,
    )


def _cudnn_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    seed,
    offset,
    bias,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    *,
    scale=None,
):
    _CALLS.append("cudnn backward")
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.shape == (*q.shape[:3], 1)
    inputs = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = flash_backward(*inputs, lse.squeeze(-1), scale=scale, causal=causal)
    return tuple(x.transpose(1, 2) for x in gradients)


# The packages, by the signatures of flash-attn 2.8, flash_attn_3 and flash-attn-4.


def _flash2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    _CALLS.append("flash2")
    window = flash2_window(window_size_left, window_size_right, causal, k.shape[1])
    return (
        *flash_forward(
            q, k, v, scale=softmax_scale, causal=causal, softcap=softcap, **window
        ),
        None,
        None,
    )


def _flash2_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    _CALLS.append("flash2 varlen")
    window = flash2_window(window_size_left, window_size_right, causal, max_seqlen_k)
    cuts = cu_seqlens_q, cu_seqlens_k
    return (
        *flash_forward(
            q,
            k,
            v,
            *cuts,
            scale=softmax_scale,
            causal=causal,
            softcap=softcap,
            **window,
        ),
        None,
        None,
    )


def _flash2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    window = flash2_window(window_size_left, window_size_right, causal, k.shape[1])
    made = flash_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        **window,
    )
    for into, one in zip((dq, dk, dv), made, strict=True):
        into.copy_(one)


def _flash2_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    options = {"scale": softmax_scale, "causal": causal, "softcap": softcap}
    options |= flash2_window(window_size_left, window_size_right, causal, max_seqlen_k)
    made = flash_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, **options
    )
    for into, one in zip((dq, dk, dv), made, strict=True):
        into.copy_(one)


_FLASH3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, int attention_chunk, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
_FLASH3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool deterministic, int sm_margin) -> ()"
)


def _flash3_forward(q, k, v, *rest):
    _CALLS.append("flash3" if rest[4] is None else "flash3 varlen")
    queries, keys, (scale, causal, left, right, _, softcap) = (
        rest[4],
        rest[5],
        rest[20:26],
    )
    out, lse = flash_forward(
        q,
        k,
        v,
        queries,
        keys,
        scale=scale,
        causal=causal,
        left=left,
        right=right,
        softcap=softcap,
    )
    return out, lse, torch.empty(0), torch.empty(0)


def _flash3_backward(dout, q, k, v, out, lse, dq, dk, dv, queries, keys, *rest):
    scale, causal, left, right, softcap = rest[4:9]
    window = {"left": left, "right": right, "softcap": softcap}
    made = flash_backward(
        dout, q, k, v, out, lse, queries, keys, scale=scale, causal=causal, **window
    )
    for into, one in zip((dq, dk, dv), made, strict=True):
        into.copy_(one)


def _flash4_window(causal, left, right):
    """``_resolve_causal_local_window`` of flash-attn-4: None for no bound, and bounds may be negative."""
    assert left is None or left >= 0
    return {"causal": causal, "left": left, "right": 0 if causal else right}


def _flash4_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size_left=None, window_size_right=None, return_lse=False,
):  # fmt: skip
    _CALLS.append("flash4" if cu_seqlens_q is None else "flash4 varlen")
    window = _flash4_window(causal, window_size_left, window_size_right)
    out, lse = flash_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, **window
    )
    return out, lse, None, None, None


def _flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, window_size_left=None, window_size_right=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
):  # fmt: skip
    inputs = dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k
    return flash_backward(
        *inputs,
        scale=softmax_scale,
        **_flash4_window(causal, window_size_left, window_size_right),
    )


@contextmanager
def installed() -> Iterator[None]:
    """As if there were CUDA's operators for CPU tensors, and the packages."""
    libraries = Library("aten", "IMPL", "CPU"), Library("flash_attn_3", "FRAGMENT")
    for name, function in {
        "_flash_attention_forward": _torch_forward,
        "_flash_attention_backward": _torch_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    }.items():
        libraries[0].impl(name, function)
    for schema, function in (
        (_FLASH3_FORWARD, _flash3_forward),
        (_FLASH3_BACKWARD, _flash3_backward),
    ):
        libraries[1].define(schema)
        libraries[1].impl(schema.partition("(")[0], function, "CPU")
    modules = {
        "flash_attn": {},
        "flash_attn.flash_attn_interface": {
            "_flash_attn_forward": _flash2_forward,
            "_flash_attn_varlen_forward": _flash2_varlen_forward,
            "_flash_attn_backward": _flash2_backward,
            "_flash_attn_varlen_backward": _flash2_varlen_backward,
        },
        "flash_attn_interface": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {
            "_flash_attn_fwd": _flash4_forward,
            "_flash_attn_bwd": _flash4_backward,
        },
    }
    made = {name: ModuleType(name) for name in modules}
    for name, members in modules.items():
        made[name].__dict__.update(members, __spec__=ModuleSpec(name, None))
    try:
        with patch.dict(sys.modules, made):
            is_installed.cache_clear()
            forget_served()
            yield
    finally:
        is_installed.cache_clear()
        forget_served()
        for library in libraries:
            library._destroy()
        calls()
