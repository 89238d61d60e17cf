"""Conversion between a whole tensor and each rank's part."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.arguments import check_sharding
from ringspan.core.errors import LayoutError
from ringspan.core.geometry.layout import Layout
from ringspan.torch.attention.arguments import check_plain, find_group
from ringspan.torch.transport.agreement import agree


def shard(x: Tensor, layout: Layout, rank: int, dim: int, *, value: float = 0) -> Tensor:
    """Return this rank's ``pad(x, value)[positions(rank)]`` along ``dim``; differentiable.

    Raises:
        UnsupportedError: ``x`` is not a plain tensor.
        LayoutError: no layout, or no rank of it; or ``x`` does not have ``layout.length`` entries along ``dim``.
    """
    check_plain("x", x)
    check_sharding(x.shape, layout, dim)
    if x.shape[dim] != layout.length:
        raise LayoutError(f"dimension {dim} has {x.shape[dim]} entries, but must have the layout's {layout.length}")
    missing = layout.padded_length - layout.length
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_full(shape, value)), dim)
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)).to(x.device))


def unshard(x: Tensor, layout: Layout, group: dist.ProcessGroup | DeviceMesh | None, dim: int) -> Tensor:
    """Gather the whole tensor, in order and without padding, from every rank's part; not differentiable.

    Raises:
        UnsupportedError: ``x`` is not a plain tensor, or ``group`` is not a group of this rank.
        LayoutError: no layout, or of another number of ranks, or of other ``tokens_per_rank`` than ``x`` along ``dim``.
        PeerMismatch: the ranks have other shapes, dtypes or layouts; on every rank.
    """
    check_plain("x", x)
    check_sharding(x.shape, layout, dim)
    group = find_group(group)
    if x.shape[dim] != layout.tokens_per_rank:
        raise LayoutError(
            f"dimension {dim} has {x.shape[dim]} entries, but must have the layout's {layout.tokens_per_rank} per rank"
        )
    ranks = dist.get_world_size(group) if group is not None else 1
    if layout.ranks not in (1, ranks):
        raise LayoutError(f"the layout is for {layout.ranks} ranks, the group has {ranks}; make it for {ranks}")
    if layout.ranks > 1:
        what = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, dimension {dim}"
        agree(group, {"unshard": what, "layout": f"{layout.fingerprint} of {layout.length} tokens"})
    x = x.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(x) for _ in range(layout.ranks)]
    if layout.ranks == 1:
        parts = [x]
    else:
        dist.all_gather(parts, x, group=group)
    order = torch.from_numpy(layout.inverse[: layout.length]).to(x.device)
    return torch.cat(parts).index_select(0, order).movedim(0, dim)
