"""Conversion of a whole batch to this rank's part: shift labels, add positions, pad, permute, split."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.tree import Tree
from ringspan.core.names import BatchLayoutName, PrefixLossName
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.documents import FLATTENED, INTEGERS, Documents
from ringspan.torch.data.padding import (
    FILLER,
    IGNORED,
    real_tokens,
    refuse_targets_of_padding,
)
from ringspan.torch.engine.attention.traced import rows_of
from ringspan.torch.engine.transport.digest import digest_integers

# Keys of a batch that ``shard_batch`` returns.
SHARDED: Final = frozenset({
    "batch_digest", "document_lengths", "input_ids", "layout_digest", "media", "position_ids", "real_tokens", "routes",
    "sequence_length", "shift_labels", "tree_targets",
})  # fmt: skip

# Keys of a batch of rows that ``shard_batch`` takes.
ROWS: Final = frozenset(
    {
        "input_ids",
        "labels",
        "shift_labels",
        "attention_mask",
        "position_ids",
        *FLATTENED,
    }
)
# Keys whose values need not be tensors.
_PLAIN: Final = ("max_length_q", "max_length_k", "second_per_grid_ts")


class Sharding(NamedTuple):
    """Arguments of ``shard_batch`` by their names: how it splits a batch."""

    mesh: DeviceMesh
    layout: BatchLayoutName
    folds: int
    device: torch.device | None
    prefix_loss: PrefixLossName


def check_given(batch: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise UnsupportedError for keys other than ``taken``, values other than tensors, or misshapen ``input_ids``."""
    if unknown := sorted(set(batch) - set(taken)):
        raise UnsupportedError(
            f"shard_batch does not know {', '.join(unknown)}; it takes {', '.join(sorted(taken))}"
        )
    if "input_ids" not in batch:
        raise UnsupportedError("shard_batch needs input_ids")
    for name, value in batch.items():
        if not isinstance(value, Tensor) and name not in _PLAIN:
            raise UnsupportedError(
                f"{name} must be a tensor, got a {type(value).__name__}; collate the batch first"
            )
    tokens = batch["input_ids"]
    is_shaped = tokens.ndim == 2 and tokens.numel() > 0
    if not is_shaped or tokens.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(
            f"input_ids must be int64 or int32 (batch, tokens), got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )


def shard_rows(
    batch: Mapping[str, Any],
    how: Sharding,
    further_digests: Sequence[int] = (),
    further: Mapping[str, tuple[Tensor, int]] | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch of rows, as ``shard_batch`` does.

    ``further_digests`` are of what is added; ``further`` are values of tokens (B, S, ...) with their padding.
    """
    tokens, ring = batch["input_ids"], how.mesh.get_group("ring")
    rank, length = ring.rank(), tokens.shape[1]
    real = real_tokens(batch)
    targets = targets_of(batch, real)
    counted, lengths = Documents.of(batch, real)
    # A balanced layout depends on where the sequence ends, so a single document's length is given too.
    if how.layout == "balanced" and lengths is None:
        lengths = torch.full((len(tokens), 1), length)
    split = BatchLayout.of(how.layout, length, ring.size(), lengths, how.folds)
    local = {
        "input_ids": split.shard(tokens, rank, value=FILLER),
        "position_ids": positions_of(split, rank, counted, len(tokens)).int(),
    }
    if lengths is not None:
        local["document_lengths"] = lengths
    if real is not None and not bool(real.all()):
        local["real_tokens"] = split.shard(real, rank)
    if targets is not None:
        local["shift_labels"] = split.shard(targets, rank, value=IGNORED)
    for name, (values, value) in (further or {}).items():
        local[name] = split.shard(values, rank, value=value)
    longest = length if counted is None else int(counted.max())
    padding = None if real is None else (~real).long()
    digests = [
        digest_integers(x).to(tokens.device)
        for x in (tokens, targets, lengths, padding)
    ]
    digests += [torch.tensor(each, device=tokens.device) for each in further_digests]
    return {
        **{
            name: part.to(how.device or tokens.device).contiguous()
            for name, part in local.items()
        },
        "sequence_length": torch.tensor(longest),
        "batch_digest": torch.stack(digests),
        "layout_digest": split.digest(rank),
    }


def targets_of(batch: Mapping[str, Tensor], real: Tensor | None) -> Tensor | None:
    """Return each token's target (B, S), -100 for none; UnsupportedError if misshapen or of padding."""
    for name in ("labels", "shift_labels"):
        if name not in batch:
            continue
        if batch[name].shape != (shape := batch["input_ids"].shape):
            raise UnsupportedError(
                f"{name} has shape {tuple(batch[name].shape)}, must have {tuple(shape)}"
            )
        if batch[name].dtype not in INTEGERS:
            raise UnsupportedError(
                f"{name} must be integers, got {batch[name].dtype}; convert them with .long()"
            )
    if "shift_labels" in batch:
        targets = batch["shift_labels"].long()
        if "labels" in batch and not torch.equal(
            _shift(batch["labels"].long())[:, :-1], targets[:, :-1]
        ):
            raise UnsupportedError(
                "labels, shifted by one, are not shift_labels; give one of them"
            )
    elif "labels" in batch:
        targets = _shift(batch["labels"].long())
    else:
        return None
    name = "shift_labels" if "shift_labels" in batch else "labels"
    refuse_targets_of_padding(targets != IGNORED, real, name, int(name == "labels"))
    return targets


def _shift(x: Tensor) -> Tensor:
    return torch.cat((x[:, 1:], x.new_full((len(x), 1), IGNORED)), 1)


def positions_of(
    split: BatchLayout, rank: int, lengths: Tensor | None, rows: int
) -> Tensor:
    everywhere = split.positions(rank).expand(rows, -1)
    if lengths is None:
        return everywhere
    inside = document_positions(lengths, split.shared.padded_length)
    return inside.expand(rows, -1).gather(1, everywhere.to(lengths.device))


def document_positions(lengths: Tensor, length: int) -> Tensor:
    """Return each token's position in its document or branch; padding at the end counts on. Shape (B, length)."""
    if lengths.ndim == 3:
        found = [
            torch.from_numpy(tree.positions(length))
            for tree in rows_of(lengths)
            if isinstance(tree, Tree)
        ]
        return torch.stack(found).to(lengths.device)
    everywhere = torch.arange(length, device=lengths.device)
    ends = lengths.cumsum(1)
    starts = torch.cat((torch.zeros_like(ends[:, :1]), ends), 1)
    last = (lengths > 0).sum(1, keepdim=True) - 1
    document = torch.searchsorted(
        ends, everywhere.expand(len(lengths), -1).contiguous(), right=True
    ).minimum(last)
    return everywhere - starts.gather(1, document)
