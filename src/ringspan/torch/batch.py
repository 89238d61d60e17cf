"""From a whole batch to this rank's part: shift labels, add positions, pad, permute, split.

B batch, S global tokens, N ranks, T tokens a rank.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.layout import Layout, LayoutName

IGNORED: Final = -100  # the label of a token without a target, as in transformers and torch

_KEYS: Final = frozenset({"input_ids", "labels", "shift_labels", "attention_mask", "position_ids"})


def shard(x: Tensor, layout: Layout, rank: int, dim: int, *, value: float = 0) -> Tensor:
    """This rank's part of a whole tensor: ``pad(x, value)[positions(rank)]`` along ``dim``; differentiable.

    Raises:
        LayoutError: ``x`` does not have ``layout.length`` entries along ``dim``.
    """
    if x.shape[dim] != layout.length:
        raise LayoutError(f"dimension {dim} has {x.shape[dim]} entries, the layout is for {layout.length} tokens")
    missing = layout.padded_length - layout.length
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_full(shape, value)), dim)
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)).to(x.device))


def unshard(x: Tensor, layout: Layout, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The whole tensor, in order and without padding, from every rank's part. Gathers; not differentiable.

    Raises:
        LayoutError: ``x`` does not have ``layout.tokens_per_rank`` entries along ``dim``.
    """
    if x.shape[dim] != layout.tokens_per_rank:
        raise LayoutError(f"dimension {dim} has {x.shape[dim]} entries, the layout has {layout.tokens_per_rank} a rank")
    x = x.detach().movedim(dim, 0).contiguous()
    parts = [torch.empty_like(x) for _ in range(layout.ranks)]
    if layout.ranks == 1:
        parts = [x]
    else:
        dist.all_gather(parts, x, group=group)
    order = torch.from_numpy(layout.inverse[: layout.length]).to(x.device)
    return torch.cat(parts).index_select(0, order).movedim(0, dim)


def shard_batch(
    batch: Mapping[str, Tensor], mesh: DeviceMesh, *, layout: LayoutName = "zigzag", device: torch.device | None = None
) -> dict[str, Tensor]:
    """This rank's part of a Hugging Face batch, ready for a model that ``parallelize`` prepared.

    Every rank of one ring passes the same whole batch; replicas pass different ones. Labels are shifted here, before
    the permutation, so that each token knows its true successor; padding gets the label -100 and comes last, where no
    real token sees it.

    Args:
        batch: ``input_ids`` (B, S) and optionally ``labels`` (B, S), unshifted, or ``shift_labels`` (B, S), where entry
            i is the target of token i; an ``attention_mask`` that only marks padding on the right; consecutive
            ``position_ids``.
        mesh: the mesh of the model.
        layout: the layout that the model was parallelized with.
        device: where the result goes; where ``input_ids`` are when None.

    Returns:
        ``input_ids``, ``position_ids`` (int32) and, when there were labels, ``shift_labels``, each (B, T); and
        ``sequence_length``, S, which stays on the CPU.

    Raises:
        UnsupportedError: keys, masks or positions that cannot be honoured, by name.
    """
    unknown = sorted(set(batch) - _KEYS)
    if unknown:
        raise UnsupportedError(f"shard_batch does not know {', '.join(unknown)}; it takes {', '.join(sorted(_KEYS))}")
    tokens = batch["input_ids"]
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise UnsupportedError(f"input_ids must be (batch, tokens), got shape {tuple(tokens.shape)}")
    targets = _targets(batch)
    positions = batch.get("position_ids")
    if positions is not None and not _counts_up(positions):
        raise UnsupportedError("position_ids that restart (packed documents) are not supported; leave them out")
    ring = mesh["ring"]
    split = Layout(layout, tokens.shape[1], ring.size())
    rank = ring.get_local_rank()
    local = {
        "input_ids": shard(tokens, split, rank, 1),
        "position_ids": torch.from_numpy(split.positions(rank)).int().expand(len(tokens), -1),
    }
    if targets is not None:
        local["shift_labels"] = shard(targets, split, rank, 1, value=IGNORED)
    parts = {name: part.to(device or tokens.device).contiguous() for name, part in local.items()}
    return parts | {"sequence_length": torch.tensor(split.length)}


def _targets(batch: Mapping[str, Tensor]) -> Tensor | None:
    """The target of each token, -100 where there is none. Shape (B, S)."""
    tokens, mask = batch["input_ids"], batch.get("attention_mask")
    for name in ("labels", "shift_labels", "attention_mask"):
        if name in batch and batch[name].shape != tokens.shape:
            raise UnsupportedError(f"{name} has shape {tuple(batch[name].shape)}, input_ids {tuple(tokens.shape)}")
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any() or (mask[:, 0] == 0).any()):
        raise UnsupportedError("attention_mask may only mark padding on the right; set padding_side='right'")
    targets = batch.get("shift_labels")
    if targets is None:
        if "labels" not in batch:
            return None
        targets = _shift(batch["labels"], IGNORED)
    if mask is not None:
        targets = targets.masked_fill(_shift(mask, 0) == 0, IGNORED)
    return targets


def _shift(x: Tensor, last: int) -> Tensor:
    return torch.cat((x[:, 1:], x.new_full((len(x), 1), last)), 1)


def _counts_up(positions: Tensor) -> bool:
    expected = torch.from_numpy(np.arange(positions.shape[-1])).to(positions.device)
    return bool((positions == expected).all())
