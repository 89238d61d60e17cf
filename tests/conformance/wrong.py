"""Attentions that are wrong in ways that others have shipped, and one that is right and not ours: all keys gathered."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.conformance.own import mask_of
from ringspan.core.geometry.layout import Layout

KEPT: dict[Any, Any] = {}


class Gathered(torch.autograd.Function):
    """All ranks' shards, (N, B, G, T, D). (torch's own differentiable all_gather gives wrong gradients over gloo where
    these are not contiguous: the suite said so.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx = dx.contiguous()
        dist.all_reduce(dx, group=ctx.group)
        return dx[dist.get_rank(ctx.group)], None


def gathered(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, documents: Any, length: int, group: Any,
    hides_padding: bool = True, local_window: bool = False, chunk: int = 0, dropped: int = 0,
) -> Tensor:  # fmt: skip
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    layout = Layout("zigzag", length, ranks)
    keys, values = (torch.cat(list(Gathered.apply(each, group)), 2) for each in (k, v))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (each.repeat_interleave(repeats, 1) for each in (keys, values))
    positions = layout.permutation
    mask = mask_of(causal, None if local_window else window, documents)
    allowed = torch.from_numpy(mask.dense(layout.positions(rank), positions))
    if local_window and window:
        inside = torch.arange(keys.shape[2]) % (keys.shape[2] // ranks)
        allowed &= (torch.arange(q.shape[2])[:, None] - inside[None, :]).abs() < window
    if hides_padding:
        allowed = allowed & torch.from_numpy(positions < length - dropped)
    if chunk:
        return _rounded(q, keys, values, allowed, chunk)
    scores = (q.float() @ keys.float().mT) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num()
    return (weights @ values.float()).to(q.dtype)


def _rounded(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, chunk: int) -> Tensor:
    """The result after each block in q's dtype."""
    out, lse = torch.zeros_like(q), torch.full((*q.shape[:3], 1), float("-inf"))
    for first in range(0, k.shape[2], chunk):
        some = slice(first, first + chunk)
        scores = (q.float() @ k[:, :, some].float().mT) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed[:, some], -1e9)
        new = scores.logsumexp(-1, keepdim=True)
        whole = torch.logaddexp(lse, new)
        part = (scores - whole).exp() @ v[:, :, some].float()
        out, lse = (out.float() * (lse - whole).exp() + part).to(q.dtype), whole
    return out


def leaking(*args: Tensor, documents: Any, **options: Any) -> Tensor:
    return gathered(*args, documents=None, **options)


def padded(*args: Tensor, **options: Any) -> Tensor:
    return gathered(*args, hides_padding=False, **options)


def windowed_by_block(*args: Tensor, **options: Any) -> Tensor:
    return gathered(*args, local_window=True, **options)


def rounded_down(*args: Tensor, length: int, **options: Any) -> Tensor:
    """Keys of the last, shorter part are dropped."""
    return gathered(*args, length=length, dropped=length % 8, **options)


def windowless(*args: Tensor, window: int | None, **options: Any) -> Tensor:
    return gathered(*args, window=None, **options)


def rounding(*args: Tensor, **options: Any) -> Tensor:
    return gathered(*args, chunk=4, **options)


def stale(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    kept = KEPT.setdefault(("stale", k.shape), k.detach().clone())
    return gathered(q, k - k.detach() + kept, v, **options)


def without_remote_gradients(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, **options: Any
) -> Tensor:
    """dk and dv of other ranks' queries are lost."""
    out = gathered(q, k.detach(), v.detach(), group=group, **options)
    alone = torch.nn.functional.scaled_dot_product_attention(
        q.detach(), k, v, enable_gqa=True
    )
    return out + (alone - alone.detach())


def grouped_by_mean(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The gradient of a key that heads share is their mean."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (each / repeats + (each - each / repeats).detach() for each in (k, v))
    return gathered(q, k, v, **options)


def contiguous_only(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Memory that is read as if it were contiguous."""
    strides = torch.empty(q.shape).stride()
    wrong = torch.as_strided(q.detach(), q.shape, strides)
    return gathered(q + (wrong - q).detach(), k, v, **options)


def one_buffer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Backward works only for the newest forward pass, whose buffers it reads."""
    mine = KEPT["newest"] = object()
    out = gathered(q, k, v, **options)
    out.register_hook(lambda gradient: gradient * float(KEPT["newest"] is mine))
    return out


def first_buffer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Backward works only for the first forward pass."""
    is_first = KEPT.setdefault("first", q) is q
    out = gathered(q, k, v, **options)
    out.register_hook(lambda gradient: gradient * float(is_first))
    return out


def stale_without_gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Only where nothing is trained are keys kept by their shape."""
    return (gathered if torch.is_grad_enabled() else stale)(q, k, v, **options)


def nothing_without_gradients(
    q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    """Where nothing is trained, no documents leak, for there is nothing."""
    out = gathered(q, k, v, **options)
    return out if torch.is_grad_enabled() else torch.zeros_like(out)


def not_a_number(*args: Tensor, **options: Any) -> Tensor:
    return gathered(*args, **options) * float("nan")


def one_head(*args: Tensor, **options: Any) -> Tensor:
    return gathered(*args, **options)[:, :1]


def unable(*args: Tensor, window: int | None, **options: Any) -> Tensor:
    if window:
        raise NotImplementedError("no windows")
    return gathered(*args, window=None, **options)


def nothing(*args: Tensor, **options: Any) -> Tensor:
    raise NotImplementedError("anything")


def failing(*args: Tensor, **options: Any) -> Tensor:
    raise RuntimeError("shapes do not fit\nand more")


def loss(logits: Tensor, labels: Tensor, *, group: Any) -> Tensor:
    total = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    count = (labels != -100).sum()
    dist.all_reduce(count, group=group)
    whole = total.detach().clone()
    dist.all_reduce(whole, group=group)
    return (total + (whole - total).detach()) / count


def mean_of_means(logits: Tensor, labels: Tensor, *, group: Any) -> Tensor:
    mean = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    ).nan_to_num()
    whole = mean.detach().clone()
    dist.all_reduce(whole, group=group)
    return (mean + (whole - mean).detach()) / dist.get_world_size(group)


def detached(logits: Tensor, labels: Tensor, *, group: Any) -> Tensor:
    return loss(logits, labels, group=group).detach()


def untracked(logits: Tensor, labels: Tensor, *, group: Any) -> Tensor:
    """The right loss, of a graph that does not have the logits."""
    return loss(logits.detach().requires_grad_(), labels, group=group)


def without_targets_detached(
    logits: Tensor, labels: Tensor, *, group: Any, times: float = 1.0
) -> Tensor:
    """Right, and on a rank without targets a number without a graph."""
    value = loss(
        logits * times + (logits - logits * times).detach(), labels, group=group
    )
    return value if (labels != -100).any() else value.detach()


def times_ranks(logits: Tensor, labels: Tensor, *, group: Any) -> Tensor:
    """The gradient is times the number of ranks, as a differentiable all-reduce makes it."""
    return without_targets_detached(
        logits, labels, group=group, times=dist.get_world_size(group)
    )
