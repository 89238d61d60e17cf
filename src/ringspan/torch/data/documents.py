"""Packed documents of a whole batch, by its positions or by what collators that flatten a batch say."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.torch.data.padding import behind_padding

INTEGERS: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# Keys with which collators that flatten a batch into one row describe its documents.
FLATTENED: Final = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)


class Documents(NamedTuple):
    """Lengths of the documents (B, most documents) of a batch's rows; None if each row is one."""

    counted: Tensor | None
    """As positions count them."""
    seen: Tensor | None
    """As attention sees them: padding on the left is a document with the tokens after it."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], real: Tensor | None) -> "Documents":
        """Find a batch's documents; UnsupportedError if its keys contradict each other."""
        tokens, has_positions = batch["input_ids"], "position_ids" in batch
        lengths = None
        if has_positions:
            lengths = _of_positions(batch["position_ids"], tokens)
        if any(name in batch for name in FLATTENED):
            lengths = _of_flattened(batch, lengths)
        if real is None:
            return cls(lengths, lengths)
        named = [name for name in ("position_ids", *FLATTENED) if name in batch]
        # Positions that count over the whole row are the ones of transformers, which count left padding too.
        is_plain = lengths is None and named in ([], ["position_ids"])
        said_by = None if is_plain else named[0]
        return cls(lengths, behind_padding(real.cpu(), lengths, said_by))


def _of_flattened(batch: Mapping[str, Any], lengths: Tensor | None) -> Tensor | None:
    """Return a flattened row's document lengths; raise if its collator's values contradict each other.

    ``lengths`` are those by its positions, which need not be given.
    """
    given = [name for name in FLATTENED if name in batch]
    rows, length = batch["input_ids"].shape
    if rows != 1:
        raise UnsupportedError(
            f"{given[0]} must be flattened into one row, input_ids has {rows}"
        )
    said: dict[str, list[int]] = {}
    if "position_ids" in batch:
        said["position_ids"] = [length] if lengths is None else lengths[0].tolist()
    for name in given:
        if name in _SAYS:
            said[name] = _SAYS[name](name, batch[name], length)
    if not said:
        raise UnsupportedError(f"{given[0]} also needs position_ids or cu_seq_lens_q")
    documents = _agreed(said)
    for name in ("max_length_q", "max_length_k"):
        if name in batch and int(batch[name]) != max(documents):
            raise UnsupportedError(
                f"{name}={int(batch[name])}, the longest document has {max(documents)} tokens; set it to that"
            )
    return torch.tensor([documents]) if len(documents) > 1 else None


def _by_ends(name: str, value: Tensor, length: int) -> list[int]:
    """Return document lengths by the places where documents end, 0 first."""
    if value.dtype not in INTEGERS:
        raise UnsupportedError(
            f"{name} must be integers, got {value.dtype}; convert it with .int()"
        )
    ends = value.flatten().tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length:
        shown = " to ".join(map(str, ends[:1] + ends[-1:])) or "none"
        raise UnsupportedError(
            f"{name} must begin with 0 and end with {length}, the tokens of input_ids; got {shown}"
        )
    each = [after - before for before, after in pairwise(ends)]
    if min(each) < 0:
        raise UnsupportedError(
            f"{name} must not decrease, as behind entry {each.index(min(each))}"
        )
    # Lists of a fixed size repeat the last end.
    return [size for size in each if size]


def _by_numbers(name: str, value: Tensor, length: int) -> list[int]:
    """Return document lengths by each token's number of its document."""
    if value.shape != (1, length):
        raise UnsupportedError(
            f"{name} has shape {tuple(value.shape)}, must have (1, {length})"
        )
    _, counts = torch.unique_consecutive(value, return_counts=True)
    return counts.tolist()


# What keys of a flattened batch say of its documents.
_SAYS: Final[Mapping[str, Callable[[str, Tensor, int], list[int]]]] = {
    "cu_seq_lens_q": _by_ends,
    "cu_seq_lens_k": _by_ends,
    "seq_idx": _by_numbers,
}


def _agreed(said: Mapping[str, list[int]]) -> list[int]:
    """Return the document lengths that all keys say; UnsupportedError if two say different ones."""
    first, documents = next(iter(said.items()))
    for name, others in said.items():
        if others == documents:
            continue
        pairs = enumerate(zip(documents, others, strict=False))
        number = next(i for i, (one, other) in pairs if one != other)
        raise UnsupportedError(
            f"{first} and {name} say different documents, {len(documents)} and {len(others)}: number {number} "
            f"(from 0) has {documents[number]} and {others[number]} tokens; leave one out"
        )
    return documents


def _of_positions(positions: Tensor, tokens: Tensor) -> Tensor | None:
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
