"""Conversion of a whole batch to this rank's part: shift labels, add positions, pad, permute, split."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.tree import Tree
from ringspan.core.names import (
    PREFIX_LOSS_NAMES,
    BatchLayoutName,
    PrefixLossName,
    find_name,
)
from ringspan.torch.attention.traced import rows_of
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.media import MEDIA, media_of
from ringspan.torch.data.padding import (
    FILLER,
    IGNORED,
    behind_padding,
    real_tokens,
    refuse_targets_of_padding,
)
from ringspan.torch.data.tree import SEGMENTS, shard_segments
from ringspan.torch.runtime.foreign_mesh import ring_mesh
from ringspan.torch.transport.digest import digest_integers

# Keys of a batch that ``shard_batch`` returns.
SHARDED: Final = frozenset({
    "batch_digest", "document_lengths", "input_ids", "layout_digest", "media", "position_ids", "real_tokens",
    "sequence_length", "shift_labels", "tree_targets",
})  # fmt: skip

_INTEGERS: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# Keys with which collators that flatten a batch into one row describe its documents.
_FLATTENED: Final = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
# Keys of a batch that ``shard_batch`` takes.
TAKEN: Final = (
    MEDIA
    | SEGMENTS
    | {
        "input_ids",
        "labels",
        "shift_labels",
        "attention_mask",
        "position_ids",
        *_FLATTENED,
    }
)


def shard_batch(
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    layout: BatchLayoutName = "zigzag",
    folds: int = 1,
    device: torch.device | None = None,
    prefix_loss: PrefixLossName = "once",
) -> dict[str, Any]:
    """Return this rank's part of a Hugging Face batch, ready for a model that ``parallelize`` prepared.

    Ranks of one ring pass the same whole batch, replicas different ones. Labels are shifted here, before the
    permutation; padding gets the label -100 and comes last, unseen by real tokens.

    Args:
        batch: ``input_ids`` (B, S); ``labels`` (B, S), unshifted, or ``shift_labels``, with token i's target in entry i
            or -100; ``attention_mask`` (B, S), 0 for padding left or right of tokens or whole rows, without targets;
            ``position_ids`` (B, S) or (S,), from 0 for each packed document; of flattened batches (transformers, TRL)
            ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (documents + 1,), ``max_length_q`` and ``max_length_k``, ``seq_idx``
            (1, S). Images and videos of docs/multimodal.md by the names of transformers' processors (``pixel_values``,
            ``image_grid_thw``, ...), best on the CPU. Or a tree: ``input_ids`` (1, S), ``labels``,
            ``segment_lengths`` and ``segment_parents`` (segments,), as of ``rs.tree``; positions count along branches,
            and a parent's last token predicts the first of each child. None entries are left out.
        mesh: the mesh of the model.
        layout: as given to ``parallelize``. ``balanced`` makes one for the documents of each sequence.
        folds: as given to ``parallelize``.
        device: of the result; that of ``input_ids`` if None.
        prefix_loss: count targets in segments that others continue ``once``, once in ``each`` branch, as separate
            rows do, or not at all (``none``).

    Returns:
        ``input_ids``, ``position_ids`` (int32) and, given labels, ``shift_labels``, each (B, T); ``document_lengths``
        (B, most documents), 0 after the last one, if packed or padded on the left, where padding is a document counted
        with the tokens after it; ``real_tokens`` (B, T) if there is padding, for expert routers; ``sequence_length``,
        of the longest document or row, on the CPU; ``media``; ``batch_digest`` of tokens, targets, documents, padding
        (and ``media``) and ``layout_digest``, to check that ranks got the same batch, and the model's layout.
        Of a tree, ``document_lengths`` are lengths and parents (1, segments, 2), ``shift_labels`` (1, R) this rank's
        targets, ``tree_targets`` (R, 2) their local tokens and places in the row; (R, 3) with weights if any is not 1.

    Raises:
        UnsupportedError: keys, masks or positions that cannot be honoured, by name.
    """
    mesh = ring_mesh(mesh)
    find_name("prefix_loss", prefix_loss, PREFIX_LOSS_NAMES, ConfigError)
    batch = {name: value for name, value in batch.items() if value is not None}
    unknown = sorted(set(batch) - TAKEN)
    if unknown:
        raise UnsupportedError(
            f"shard_batch does not know {', '.join(unknown)}; it takes {', '.join(sorted(TAKEN))}"
        )
    if "input_ids" not in batch:
        raise UnsupportedError("shard_batch needs input_ids")
    for name, value in batch.items():
        if (
            not isinstance(value, Tensor)
            and not name.startswith("max_length")
            and name != "second_per_grid_ts"
        ):
            raise UnsupportedError(
                f"{name} must be a tensor, got a {type(value).__name__}; collate the batch first"
            )
    tokens = batch["input_ids"]
    if (
        tokens.ndim != 2
        or not tokens.numel()
        or tokens.dtype not in (torch.int64, torch.int32)
    ):
        raise UnsupportedError(
            f"input_ids must be int64 or int32 (batch, tokens), got {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    if not SEGMENTS.isdisjoint(batch):
        if folds > 1:
            raise UnsupportedError(
                f"a tree of segments is not supported in folds={folds}; use folds=1"
            )
        return shard_segments(batch, mesh, layout, device, prefix_loss)
    real = real_tokens(batch)
    targets = targets_of(batch, real)
    lengths = (
        _document_lengths(batch["position_ids"], tokens)
        if "position_ids" in batch
        else None
    )
    lengths = _flattened_lengths(batch, lengths, has_positions="position_ids" in batch)
    named = [name for name in ("position_ids", *_FLATTENED) if name in batch]
    # Positions that count over the whole row are the ones of transformers, which count left padding too.
    said_by = None if lengths is None and named in ([], ["position_ids"]) else named[0]
    counted = lengths
    if real is not None:
        lengths = behind_padding(real.cpu(), lengths, said_by)
    ring = mesh.get_group("ring")
    # A balanced layout depends on where the sequence ends, so a single document's length is given too.
    if layout == "balanced" and lengths is None:
        lengths = torch.full((len(tokens), 1), tokens.shape[1])
    split, rank = (
        BatchLayout.of(layout, tokens.shape[1], ring.size(), lengths, folds),
        ring.rank(),
    )
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
    parts = {
        name: part.to(device or tokens.device).contiguous()
        for name, part in local.items()
    }
    longest = tokens.shape[1] if counted is None else int(counted.max())
    padding = None if real is None else (~real).long()
    digests = [
        digest_integers(x).to(tokens.device)
        for x in (tokens, targets, lengths, padding)
    ]
    media = media_of(batch)
    if media is not None:
        digests.append(torch.tensor(media.digest, device=tokens.device))
    parts |= {
        "sequence_length": torch.tensor(longest),
        "batch_digest": torch.stack(digests),
    }
    return (
        parts
        | {"layout_digest": split.digest(rank)}
        | ({} if media is None else {"media": media})
    )


def _flattened_lengths(
    batch: Mapping[str, Any], lengths: Tensor | None, *, has_positions: bool
) -> Tensor | None:
    """Return a flattened row's document lengths; raise if its collator's values contradict each other."""
    given = [name for name in _FLATTENED if name in batch]
    if not given:
        return lengths
    rows, length = batch["input_ids"].shape
    if rows != 1:
        raise UnsupportedError(
            f"{given[0]} must be flattened into one row, input_ids has {rows}"
        )
    said = (
        {}
        if not has_positions
        else {"position_ids": [length] if lengths is None else lengths[0].tolist()}
    )
    for name in given:
        if name.startswith("cu_seq_lens"):
            if batch[name].dtype not in _INTEGERS:
                raise UnsupportedError(
                    f"{name} must be integers, got {batch[name].dtype}; convert it with .int()"
                )
            ends = batch[name].flatten().tolist()
            if len(ends) < 2 or ends[0] != 0 or ends[-1] != length:
                raise UnsupportedError(
                    f"{name} must begin with 0 and end with {length}, the tokens of input_ids; got "
                    f"{' to '.join(map(str, (ends[:1] + ends[-1:]))) or 'none'}"
                )
            each = [after - before for before, after in pairwise(ends)]
            if min(each) < 0:
                raise UnsupportedError(
                    f"{name} must not decrease, as behind entry {each.index(min(each))}"
                )
            # Lists of a fixed size repeat the last end.
            said[name] = [size for size in each if size]
        elif name == "seq_idx":
            if batch[name].shape != (1, length):
                raise UnsupportedError(
                    f"seq_idx has shape {tuple(batch[name].shape)}, must have (1, {length})"
                )
            said[name] = torch.unique_consecutive(batch[name], return_counts=True)[
                1
            ].tolist()
    if not said:
        raise UnsupportedError(f"{given[0]} also needs position_ids or cu_seq_lens_q")
    first, documents = next(iter(said.items()))
    for name, others in said.items():
        if others != documents:
            number = next(
                i
                for i, (one, other) in enumerate(zip(documents, others, strict=False))
                if one != other
            )
            raise UnsupportedError(
                f"{first} and {name} say different documents, {len(documents)} and {len(others)}: number {number} "
                f"(from 0) has {documents[number]} and {others[number]} tokens; leave one out"
            )
    for name in ("max_length_q", "max_length_k"):
        if name in batch and int(batch[name]) != max(documents):
            raise UnsupportedError(
                f"{name}={int(batch[name])}, the longest document has {max(documents)} tokens; set it to that"
            )
    return torch.tensor([documents]) if len(documents) > 1 else None


def targets_of(batch: Mapping[str, Tensor], real: Tensor | None) -> Tensor | None:
    """Return each token's target (B, S), -100 for none; UnsupportedError if misshapen or of padding."""
    for name in ("labels", "shift_labels"):
        if name not in batch:
            continue
        if batch[name].shape != (shape := batch["input_ids"].shape):
            raise UnsupportedError(
                f"{name} has shape {tuple(batch[name].shape)}, must have {tuple(shape)}"
            )
        if batch[name].dtype not in _INTEGERS:
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


def _document_lengths(positions: Tensor, tokens: Tensor) -> Tensor | None:
    """Return document lengths from positions that restart at 0; None if each sequence is one."""
    if positions.ndim == 3:
        raise UnsupportedError(
            f"position_ids of shape {tuple(positions.shape)} have a time, a row and a column; leave them out, models "
            "find them by the grids of images and videos"
        )
    if positions.shape[-1] != tokens.shape[1] or positions.shape[:-1] not in (
        (),
        (1,),
        tokens.shape[:1],
    ):
        raise UnsupportedError(
            f"position_ids has shape {tuple(positions.shape)}, must have {tuple(tokens.shape)}"
        )
    positions = positions.expand(tokens.shape)
    starts = positions == 0
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    if not bool(starts[:, 0].all()) or not bool((goes_on | starts[:, 1:]).all()):
        raise UnsupportedError(
            "position_ids must count up by one, from 0 at the start and for each packed document"
        )
    if not bool(starts[:, 1:].any()):
        return None
    rows = [
        torch.diff(torch.cat((row.nonzero()[:, 0].cpu(), torch.tensor([len(row)]))))
        for row in starts
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
