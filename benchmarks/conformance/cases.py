"""Questions to an attention: each rank compares its shard with dense float64 attention, nothing is sent."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.conformance.own import mask_of
from ringspan.core import reference
from ringspan.core.geometry.layout import Layout

Attention = Callable[..., Tensor]
Loss = Callable[..., Tensor]
FLOAT32_LIMIT: Final = 1e-5  # ||x - exact|| / ||exact||
# times the error that PyTorch's attention has in one process
BFLOAT16_LIMIT: Final = 1.4
LOSS_LIMIT: Final = 1e-5
# what stands where there are no tokens; whoever attends to it is far off
_PADDING: Final = 30.0
NAMES: Final = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Problem:
    length: int = 96
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    seed: int = 0


class Setting(NamedTuple):
    attention: Attention
    loss: Loss | None
    layout: str
    group: Any
    device: torch.device


# Per name: the squared norms of a shard's difference and of what it should be; the second may be another error.
Parts = dict[str, tuple[float, float]]


def exact(problem: Problem) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return q, k, v, dout; and out, dq, dk, dv of the whole sequence in float64."""
    generator = np.random.default_rng(problem.seed)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    inputs = [
        generator.standard_normal((1, each, problem.length, problem.head_dim))
        for each in heads
    ]
    # Of numbers that every dtype holds, so that rounding the inputs is no error of the attention's.
    q, k, v, dout = (
        torch.from_numpy(each).bfloat16().double().numpy() for each in inputs
    )
    positions = np.arange(problem.length)
    allowed = mask_of(problem.causal, problem.window, problem.documents).dense(
        positions, positions
    )
    scale = problem.head_dim**-0.5
    out, _ = reference.attention(q, k, v, allowed, scale)
    return [q, k, v, dout], [out, *reference.backward(dout, q, k, v, allowed, scale)]


def shards(
    setting: Setting, problem: Problem, whole: list[np.ndarray], dtype: torch.dtype
) -> list[Tensor]:
    """Return a rank's tokens of q, k, v, dout, and ``_PADDING`` (in dout nothing) past the end."""
    positions = _positions(setting, problem)
    is_token = positions < problem.length
    found: list[Tensor] = []
    for number, each in enumerate(whole):
        filled = np.full(
            (*each.shape[:2], len(positions), each.shape[3]),
            0.0 if number == 3 else _PADDING,
        )
        filled[:, :, is_token] = each[:, :, positions[is_token]]
        found.append(torch.from_numpy(filled).to(setting.device, dtype))
    return found


def own_part(
    setting: Setting, problem: Problem, whole: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which local tokens are not padding, and their part of a whole array."""
    positions = _positions(setting, problem)
    is_token = positions < problem.length
    return is_token, whole[:, :, positions[is_token]]


def _positions(setting: Setting, problem: Problem) -> np.ndarray:
    rank, ranks = dist.get_rank(setting.group), dist.get_world_size(setting.group)
    return Layout(setting.layout, problem.length, ranks).positions(rank)  # pyright: ignore[reportArgumentType]


def call(setting: Setting, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = setting.attention(
        q,
        k,
        v,
        causal=problem.causal,
        window=problem.window,
        documents=problem.documents,
        length=problem.length,
        group=setting.group,
    )
    if out.shape != q.shape:
        raise ValueError(f"returned {tuple(out.shape)}, q has {tuple(q.shape)}")
    return out


def compare(
    setting: Setting, problem: Problem, found: list[Tensor], expected: list[np.ndarray]
) -> Parts:
    """``found`` are the first of ``NAMES``."""
    parts: Parts = {}
    for name, each, whole in zip(NAMES, found, expected, strict=False):
        is_token, right = own_part(setting, problem, whole)
        left = each.detach().double().cpu().numpy()[:, :, is_token]
        parts[name] = _squares(left - right, right)
    return parts


def _squares(difference: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    return float((difference**2).sum()), float((right**2).sum())


def _added(*several: Parts) -> Parts:
    total: Parts = {}
    for parts in several:
        for name, (wrong, right) in parts.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + wrong, before[1] + right)
    return total


def forward_backward(
    setting: Setting, problem: Problem, dtype: torch.dtype = torch.float32
) -> Parts:
    inputs, expected = exact(problem)
    return _called(setting, problem, shards(setting, problem, inputs, dtype), expected)


def _called(
    setting: Setting, problem: Problem, inputs: list[Tensor], expected: list[np.ndarray]
) -> Parts:
    leaves, dout = [each.requires_grad_() for each in inputs[:3]], inputs[3]
    out = call(setting, problem, *leaves)
    return compare(
        setting, problem, [out, *torch.autograd.grad(out, leaves, dout)], expected
    )


def strided(setting: Setting, problem: Problem) -> Parts:
    """Check inputs as models have them: heads and tokens transposed, not contiguous."""
    inputs, expected = exact(problem)
    q, k, v, dout = shards(setting, problem, inputs, torch.float32)
    leaves = [each.transpose(1, 2).contiguous().requires_grad_() for each in (q, k, v)]
    out = call(setting, problem, *(leaf.transpose(1, 2) for leaf in leaves))
    gradients = [
        each.transpose(1, 2) for each in torch.autograd.grad(out, leaves, dout)
    ]
    return compare(setting, problem, [out, *gradients], expected)


def stale(setting: Setting, problem: Problem) -> Parts:
    """Call again without gradients on other keys in the same memory, then with gradients."""
    first, _ = exact(problem)
    second, expected = exact(replace(problem, seed=problem.seed + 1))
    inputs = shards(setting, problem, first, torch.float32)
    with torch.no_grad():
        call(setting, problem, *inputs[:3])
        for old, new in zip(
            inputs, shards(setting, problem, second, torch.float32), strict=True
        ):
            old.copy_(new)
        out = call(setting, problem, *inputs[:3])
    return _added(
        compare(setting, problem, [out], expected),
        _called(setting, problem, inputs, expected),
    )


def two_passes(setting: Setting, problem: Problem) -> Parts:
    """Two forward passes before the backward passes of both, as in layers, or a loss over two batches."""
    passes: list[tuple[Tensor, list[Tensor], Tensor, list[np.ndarray]]] = []
    for seed in (problem.seed, problem.seed + 1):
        inputs, expected = exact(replace(problem, seed=seed))
        *tensors, dout = shards(setting, problem, inputs, torch.float32)
        leaves = [each.requires_grad_() for each in tensors]
        passes.append((call(setting, problem, *leaves), leaves, dout, expected))
    return _added(
        *(
            compare(
                setting,
                problem,
                [out, *torch.autograd.grad(out, leaves, dout)],
                expected,
            )
            for out, leaves, dout, expected in passes
        )
    )


def leak(setting: Setting, problem: Problem) -> Parts:
    """Change the first document, which must not affect later ones: ``out`` is their error, ``change`` the effect."""
    assert problem.documents
    first, (expected, *_) = exact(problem)
    changed = [each.copy() for each in first]
    for each in changed[:3]:
        each[:, :, : problem.documents[0]] *= -3.0
    with torch.no_grad():
        before, after = (
            call(setting, problem, *shards(setting, problem, inputs, torch.float32)[:3])
            for inputs in (first, changed)
        )
    positions = np.arange(problem.length)[None, None, :, None]
    is_token, position = own_part(setting, problem, positions)
    later = position[0, 0, :, 0] >= problem.documents[0]
    right = own_part(setting, problem, expected)[1][:, :, later]
    left, changed_to = (
        each.double().cpu().numpy()[:, :, is_token][:, :, later]
        for each in (before, after)
    )
    return {
        "out": _squares(left - right, right),
        "change": _squares(changed_to - left, right),
    }


def bfloat16(setting: Setting, problem: Problem) -> Parts:
    """Errors in bfloat16, divided by those of PyTorch's attention in one process."""
    parts = forward_backward(setting, problem, torch.bfloat16)
    inputs, expected = exact(problem)
    q, k, v, dout = (
        torch.from_numpy(each).to(setting.device, torch.bfloat16) for each in inputs
    )
    leaves = [each.requires_grad_() for each in (q, k, v)]
    out = scaled_dot_product_attention(
        leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True
    )
    found: Parts = {}
    for name, each, whole in zip(
        NAMES, [out, *torch.autograd.grad(out, leaves, dout)], expected, strict=True
    ):
        _, right = own_part(setting, problem, whole)
        _, left = own_part(setting, problem, each.detach().double().cpu().numpy())
        found[name] = (parts[name][0], float(((left - right) ** 2).sum()))
    return found


def losses(setting: Setting, problem: Problem) -> Parts:
    """Check that ranks with different numbers of targets, one with none, all compute the batch's loss."""
    assert setting.loss
    rank, ranks = dist.get_rank(setting.group), dist.get_world_size(setting.group)
    generator = torch.Generator().manual_seed(problem.seed)
    logits = torch.randn(ranks, 1, 12, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (ranks, 1, 12), generator=generator)
    for each in range(ranks):
        prompt = (
            12 if ranks > 1 else 5
        ) - 5 * each  # of several ranks the first has no target
        labels[each, :, : max(0, prompt)] = -100
    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole.flatten(0, 2), labels.flatten(), ignore_index=-100)
    (right,) = torch.autograd.grad(expected, whole)
    expected = expected.detach()
    mine = logits[rank].to(setting.device, torch.float32).requires_grad_()
    loss = setting.loss(mine, labels[rank].to(setting.device), group=setting.group)
    # what a rank has whose loss does not depend on its logits, and none has to
    left = torch.zeros_like(mine)
    if loss.requires_grad:
        (left,) = torch.autograd.grad(loss, mine, materialize_grads=True)
    difference = left.double().cpu() - right[rank]
    return {
        "loss": (
            float((loss.detach().double().cpu() - expected) ** 2),
            float(expected**2),
        ),
        "dlogits": _squares(difference.numpy(), right[rank].numpy()),
    }


class Case(NamedTuple):
    """A question to an attention; ``limit`` is of the error over all ranks."""

    name: str
    cause: str  # what it usually is when this one fails
    problem: Problem = Problem()
    run: Callable[[Setting, Problem], Parts] = forward_backward
    limit: float = FLOAT32_LIMIT


_GROUPED: Final = (
    "key/value heads are repeated, and their gradients not summed over the group"
)
_BLOCKS: Final = "the window is passed to each block unchanged, or blocks that it reaches are skipped"
_LOSS: Final = (
    "losses of ranks are averaged though their numbers of targets differ, "
    "or the loss is times the number of ranks"
)
_ROUNDED: Final = (
    "partial results are rounded at every hop instead of adding up in float32"
)
_DOCUMENTS: Final = Problem(documents=(31, 40, 25))
_UNEVEN: Final = Problem(length=91, causal=False)
CASES: Final = (
    Case("causal", "tokens are in another layout, or labels of positions are local"),
    Case("grouped heads", _GROUPED, Problem(kv_heads=2)),
    Case(
        "uneven length",
        "the length was rounded down, or padding is attended to",
        Problem(length=91),
    ),
    Case(
        "full, uneven",
        "padding at the end is attended to, which a causal mask hides",
        _UNEVEN,
    ),
    Case(
        "strides",
        "a kernel or a message takes memory for contiguous that is not",
        run=strided,
    ),
    Case(
        "window in a block",
        "the window is dropped, or passed to each block unchanged",
        Problem(window=5),
    ),
    Case("window over blocks", _BLOCKS, Problem(window=41)),
    Case(
        "documents",
        "boundaries are taken as positions of a rank, or dropped",
        _DOCUMENTS,
    ),
    Case("document leak", "later documents see an earlier one", _DOCUMENTS, leak),
    Case(
        "stale keys",
        "keys or schedules are kept from an earlier call, by shape or by address",
        run=stale,
    ),
    Case(
        "two passes",
        "backward reads buffers that another forward pass has overwritten",
        run=two_passes,
    ),
    Case("bfloat16", _ROUNDED, Problem(length=192), bfloat16, BFLOAT16_LIMIT),
    Case("loss", _LOSS, run=losses, limit=LOSS_LIMIT),
)
