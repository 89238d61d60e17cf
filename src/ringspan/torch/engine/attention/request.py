"""Checked arguments of ``ring_attention``."""

import logging
import os
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.arguments import check_scores, find_layouts, find_mask
from ringspan.core.codec import UNCHANGED, Codec, Sent
from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import KernelName, LayoutName
from ringspan.core.remembered import Remembered
from ringspan.core.schedule.choice import Choice, choose_route
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.schedule.timing import Speeds
from ringspan.core.schedule.workspace import Shape
from ringspan.torch.engine.attention.arguments import (
    check_differentiation,
    check_heads,
    check_plain,
    check_tensors,
    find_group,
)
from ringspan.torch.engine.attention.spec import AttentionSpec, padding_of
from ringspan.torch.engine.kernels import check_name
from ringspan.torch.engine.kernels.device import rules_of
from ringspan.torch.engine.transport.agreement import NOTHING, compare_refused

_log: Final = logging.getLogger(__name__)
_logged: Final[set[Choice]] = set()


class Request(NamedTuple):
    """Arguments of ``ring_attention``, as the caller gave them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | str | None = None
    layout: LayoutName | Layout = "zigzag"
    key_layout: Layout | None = None
    group: dist.ProcessGroup | DeviceMesh | None = None
    scale: float | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    route: str = "ring"
    sent: Sent = UNCHANGED
    kernel: KernelName = "auto"

    def of_rows(self, rows: slice | Tensor) -> "Request":
        """Return the request for some sequences of the batch."""
        if rows == slice(None):
            return self
        return self._replace(q=self.q[rows], k=self.k[rows], v=self.v[rows])


_known: Final[Remembered[Hashable, AttentionSpec]] = Remembered(256)


def checked(asked: Request) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Return the operator's tensors and spec; raise like ``ring_attention``.

    The layers of a step ask the same, so it is checked once; each tensor is looked at every time.
    """
    for name, tensor in (("q", asked.q), ("k", asked.k), ("v", asked.v)):
        check_plain(name, tensor)
    q, k, v = in_autocast(asked.q, asked.k, asked.v)
    group = find_group(asked.group)
    if torch.compiler.is_compiling() or asked.route == "auto":
        spec = _spec_of(asked, group, q, k, v)
    else:
        spec = _known_spec(asked, group, q, k, v)
    check_differentiation("ring_attention", q, k, v, asked.sinks)
    return q, k, v, spec


def _known_spec(
    asked: Request, group: dist.ProcessGroup | None, q: Tensor, k: Tensor, v: Tensor
) -> AttentionSpec:
    """Return ``_spec_of`` the arguments, made once for all that ask the same."""
    alike = _alike(asked, group, q, k, v)
    try:
        spec = _known.get(alike)
    except TypeError:  # an argument without a hash, which no check lets through
        spec = None
    if spec is None:
        spec = _known[alike] = _spec_of(asked, group, q, k, v)
    return spec


def _alike(
    asked: Request, group: dist.ProcessGroup | None, *tensors: Tensor
) -> Hashable:
    """Return a key of everything that ``_spec_of`` reads."""
    # Groups that follow each other may have one name.
    place = None if group is None else (group.group_name, group.rank(), group.size())
    # A tensor of another kind, for example a DTensor, is refused although its sizes fit.
    per_head = [
        (type(x), x.layout, x.shape, x.dtype, x.device, x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in (asked.slopes, asked.sinks)
    ]
    return (
        *[(x.shape, x.dtype, x.device) for x in tensors],
        *per_head,
        asked.mask,
        asked.layout,
        asked.key_layout,
        place,
        # True equals 1 and is refused.
        type(asked.scale),
        asked.scale,
        type(asked.softcap),
        asked.softcap,
        asked.route,
        asked.sent,
        asked.kernel,
    )


def _spec_of(
    asked: Request, group: dist.ProcessGroup | None, q: Tensor, k: Tensor, v: Tensor
) -> AttentionSpec:
    """Return the spec of tensors in the dtype that autocast gives them; raise like ``ring_attention``."""
    check_tensors(q, k, v)
    sent = asked.sent.checked()
    check_name(asked.kernel)
    check_scores(asked.scale, asked.softcap)
    check_heads(q, asked.slopes, asked.sinks)
    ranks = dist.get_world_size(group) if group is not None else 1
    try:
        layout, keys = find_layouts(
            asked.layout,
            asked.key_layout,
            ranks,
            q.shape[2],
            k.shape[2],
            remedy="rs.shard or rs.shard_batch",
        )
    except LayoutError as error:
        # Another rank, with other tensors, may not see this error: tell it before raising.
        compare_refused(group, {"layout": str(error)})
        raise
    mask, route = find_mask(asked.mask), asked.route
    if route == "auto":
        route = _choose(layout, keys, mask, q, k, v, sent)
    way = Route.parse(route, ranks)
    member_heads(q.shape[1], k.shape[1], way.ulysses)
    way.check_sent_as(sent)
    return AttentionSpec(
        scale=q.shape[-1] ** -0.5 if asked.scale is None else float(asked.scale),
        softcap=float(asked.softcap or 0.0),
        mask=mask.spec,
        **_layout_options(layout, keys),
        route=route,
        sent=asked.sent,
        kernel=asked.kernel,
        group=group.group_name if group is not None else "",
    )


def _layout_options(layout: Layout, keys: Layout) -> dict[str, Any]:
    if isinstance(layout, CustomLayout) and isinstance(keys, CustomLayout):
        return {
            "layout": layout.spec,
            "key_layout": "" if keys == layout else keys.spec,
        }
    return {
        "layout": layout.name,
        "padding": padding_of(layout),
        "key_padding": padding_of(keys),
    }


# Asked once: torch.compile of PyTorch 2.11 cannot trace the question.
_HAVE_AUTOCAST: Final = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps")
    if torch.amp.is_autocast_available(kind)
)


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast does for PyTorch's own attention, except float64."""
    kind = tensors[0].device.type
    if kind not in _HAVE_AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast of a tensor's device, if it has one, rounds nothing."""
    kind = x.device.type
    if kind not in _HAVE_AUTOCAST or not torch.is_autocast_enabled(kind):
        return NOTHING
    return torch.autocast(kind, enabled=False)


def _choose(
    layout: Layout,
    keys: Layout,
    mask: Mask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sent: Codec,
) -> str:
    """Return the quickest route for these sizes at the assumed speeds of the device, and log the reason once."""
    rules = rules_of(q.device)
    # Without torchrun's variable, assume that one node has the whole ring.
    per_node = min(layout.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", layout.ranks)))
    speeds = Speeds(*rules.assumed_speeds, per_node, on_cpu=rules.cuts_for_cores)
    shape = Shape(
        batch=len(q),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=k.shape[-1],
        value_dim=v.shape[-1],
        itemsize=k.dtype.itemsize,
        sent_as=sent,
    )
    choice = choose_route(layout, mask, shape, speeds, keys)
    if choice not in _logged:
        _logged.add(choice)
        _log.info("%s", choice.reason)
    return choice.route
