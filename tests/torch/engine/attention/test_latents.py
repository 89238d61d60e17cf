"""Attention whose keys are expanded from latents on arrival, on a virtual ring, against dense attention in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.schedule import workspace
from ringspan.core.schedule.timing import sent_bytes
from ringspan.core.schedule.workspace import Shape
from ringspan.torch.engine.attention import latents
from ringspan.torch.engine.attention.block import Block
from ringspan.torch.engine.attention.part import sink_gradient
from ringspan.torch.engine.attention.request import Request
from ringspan.torch.engine.attention.spec import AttentionSpec, padding_of
from tests.core.strategies import layouts, masks
from tests.fuzz import examples
from tests.torch.engine.attention.assembled import assemble
from tests.torch.engine.attention.test_ring import gathered, part
from tests.torch.virtual import on_ranks

BATCH, HEADS, NOPE, ROTARY, VALUE, RANK, SCALE = 2, 4, 6, 2, 5, 7, 0.4
ROUTES = "ring", "bidirectional", "double-ring:1"


@pytest.fixture(autouse=True, scope="module")
def groups_of_heads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "WORTH_A_CALL_ON_CPU", 0)
        yield


def tensors_of(length, dtype):
    """q, latents, the rotary part, dout, the weight and sinks."""
    make = partial(torch.randn, generator=torch.Generator().manual_seed(length))
    sizes = (HEADS, NOPE + ROTARY), (1, RANK), (1, ROTARY), (HEADS, VALUE)
    sequences = (make(BATCH, heads, length, size).to(dtype) for heads, size in sizes)
    return *sequences, make(HEADS, NOPE + VALUE, RANK).to(dtype), make(HEADS).to(dtype)


def dense(mask, tensors):
    """Return out, and the gradients of q, latents, the rotary part, the weight and the sinks."""
    q, compressed, rotary, dout, weight, sinks = inputs = [
        x.double().requires_grad_() for x in tensors
    ]
    expanded = torch.einsum("bzkr,hdr->bhkd", compressed, weight)
    keys = torch.cat((expanded[..., :NOPE], rotary.expand(-1, HEADS, -1, -1)), -1)
    positions = np.arange(q.shape[2])
    scores = (q @ keys.mT * SCALE).masked_fill(
        ~torch.from_numpy(mask.dense(positions, positions)), -torch.inf
    )
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    out = torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ expanded[..., NOPE:]
    gradients = torch.autograd.grad(out, [x for x in inputs if x is not dout], dout)
    return [x.detach().numpy() for x in (out, *gradients)]


def test_what_does_not_apply_to_latents_raises():
    q, compressed, rotary, _, weight, _ = tensors_of(6, torch.float32)
    asked = Request(q=q, k=compressed, v=rotary, scale=SCALE)
    with pytest.raises(
        rs.UnsupportedError, match="route 'pass-q' does not carry latents; expand keys"
    ):
        latents.latent_attention(asked._replace(route="pass-q"), weight)
    with pytest.raises(
        rs.UnsupportedError, match="slopes are not applied to keys that are expanded"
    ):
        latents.latent_attention(asked._replace(slopes=torch.ones(HEADS)), weight)


def on_ring(layout, mask, route, tensors):
    """Return the same of the ring, and what all ranks send in forward."""
    *_, weight, sinks = tensors
    padding = padding_of(layout)
    spec = AttentionSpec(
        scale=SCALE,
        mask=mask.spec,
        layout=layout.name,
        padding=padding,
        key_padding=padding,
        route=route,
    )

    def run(rank, exchange):
        q, compressed, rotary, dout = (part(x, layout, rank) for x in tensors[:4])
        # of padding, by which a gradient of 0 is multiplied
        compressed = compressed.nan_to_num(1e3)
        own, expansion = (
            Block.whole(compressed, rotary),
            latents.Expansion(q, rotary, weight),
        )
        k, _ = expansion.like(q, compressed)
        ring, _ = assemble(
            rank, layout.ranks, exchange, q, k, None, spec, is_backward=False
        )
        if rank not in made:
            return latents.forward(ring, q, own, expansion, sinks)
        out, lse = made[rank]
        gradients = latents.backward(ring, (dout, q, out, lse), own, expansion)
        return out, *gradients, sink_gradient(dout, out, lse, sinks)

    made = {}
    results, mailboxes = on_ranks(layout.ranks, run)
    made = dict(enumerate(results))
    *local, dweight, dsinks = zip(*on_ranks(layout.ranks, run)[0], strict=True)
    sums = [torch.stack(each).double().sum(0).numpy() for each in (dweight, dsinks)]
    return [*(gathered([*each], layout) for each in local), *sums], sum(
        box.sent_bytes for box in mailboxes
    )


@given(layouts, masks, st.sampled_from(ROUTES))
@example(rs.Layout("zigzag", 40, 4), rs.sliding_window(9), "bidirectional")
@example(rs.Layout("striped", 37, 3), rs.documents([20, 15]), "ring")
@examples(60, suppress_health_check=[HealthCheck.too_slow])
def test_any_layout_mask_and_route_equals_expanded_keys(layout, mask, route):
    tensors = tensors_of(layout.length, torch.float64)
    found, sent = on_ring(layout, mask, route, tensors)
    for x, truth in zip(found, dense(mask, tensors), strict=True):
        assert np.abs(x - truth).max() <= 1e-12 * max(1, np.abs(truth).max())
    travels = Shape(BATCH, 1, 1, RANK, ROTARY, 8)
    assert sent == sent_bytes(
        layout, layout, mask, route, travels, range(layout.ranks)
    ), "latents, once for all heads"


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)]
)
def test_other_dtypes_sum_in_float32(dtype, limit):
    tensors, layout = tensors_of(96, dtype), rs.Layout("zigzag", 96, 4)
    found, _ = on_ring(layout, rs.causal(), "ring", tensors)
    for x, truth in zip(found, dense(rs.causal(), tensors), strict=True):
        assert np.abs(x - truth).max() <= limit * np.abs(truth).max()
