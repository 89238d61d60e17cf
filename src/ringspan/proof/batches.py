"""Batches that a proof tries, whole, and as rows that a plain model computes one by one."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ringspan.torch.data.media.inputs import TOKEN_TYPES
from ringspan.torch.data.padding import IGNORED

_FIRST_TOKEN: Final = 3  # after those that begin, end and pad
_OF_TOKENS: Final = frozenset(
    {"input_ids", "labels", "attention_mask", "position_ids"}
    | {"segment_lengths", "segment_parents"}
    | {*TOKEN_TYPES}
)
TREE: Final = "a tree of rows with one beginning"


class Batch(NamedTuple):
    """A batch of rows: ``inputs`` for ``shard_batch``, and its parts, each a row and the places that see each other."""

    inputs: dict[str, Tensor]
    parts: tuple[tuple[int, Sequence[int]], ...]
    keeps_padding: bool = False
    """True if one process reads whole rows with their padding."""

    def with_padding(self) -> "Batch":
        """Return the batch for a model whose positions count padding: each row is read whole, with its mask."""
        if "attention_mask" not in self.inputs:
            return self
        rows, length = self.inputs["input_ids"].shape
        parts = tuple((row, range(length)) for row in range(rows))
        return Batch(self.inputs, parts, keeps_padding=True)

    def with_other_padding(self) -> "Batch":
        """Return the batch with another token in place of all padding."""
        ids = self.inputs["input_ids"].masked_fill(~self.real, _FIRST_TOKEN)
        return self._replace(inputs=self.inputs | {"input_ids": ids})

    def micro(self, number: int) -> "Batch":
        """Return the batch of a micro-step: this one first, then other tokens and fewer targets."""
        if number == 0:
            return self
        ids, labels = self.inputs["input_ids"], self.inputs["labels"].clone()
        if not self.seen:  # images stand at their tokens
            ids = ids.roll(5 * number, 1)
            labels = ids.masked_fill(labels == IGNORED, IGNORED)
        labels[:, :: number + 1] = IGNORED
        return self._replace(inputs=self.inputs | {"input_ids": ids, "labels": labels})

    def read(self, row: int, places: Sequence[int]) -> dict[str, Tensor]:
        """Return the arguments of tokens for one process that reads a part."""
        names = ["input_ids"] + ["attention_mask"] * self.keeps_padding
        names += [name for name in TOKEN_TYPES if name in self.inputs]
        return {name: self.inputs[name][row : row + 1, list(places)] for name in names}

    @property
    def real(self) -> Tensor:
        """Mask (B, S) of tokens that are not padding."""
        mask = self.inputs.get("attention_mask")
        return (
            torch.ones_like(self.inputs["input_ids"]) > 0 if mask is None else mask > 0
        )

    @property
    def is_tree(self) -> bool:
        return "segment_parents" in self.inputs

    @property
    def seen(self) -> dict[str, Tensor]:
        """Return images and what belongs to them, of a batch with one part."""
        return {
            name: value for name, value in self.inputs.items() if name not in _OF_TOKENS
        }


def batches(
    ranks: int, folds: int = 1, *, vocabulary: int, tree: bool = False
) -> dict[str, Batch]:
    """Return the batches of a proof by their names, for rings of ``ranks``; their tokens do not divide by the ranks."""
    length = 24 * ranks * folds + 5
    found = {
        "one sequence": _one(length, vocabulary),
        "packed documents": _packed(length, vocabulary),
        "padding on both sides": _padded(length, vocabulary),
        "labels masked at the start": _masked(length, vocabulary),
        "a rank without targets": _early(length, vocabulary, ranks),
    }
    return found | ({TREE: _tree(length, vocabulary)} if tree else {})


def random_tokens(rows: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """Return tokens (rows, length), the same each time, without those that begin, end and pad."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(_FIRST_TOKEN, vocabulary, (rows, length), generator=random)


def _one(length: int, vocabulary: int) -> Batch:
    ids = random_tokens(1, length, vocabulary, 1)
    return Batch({"input_ids": ids, "labels": ids.clone()}, ((0, range(length)),))


def _packed(length: int, vocabulary: int) -> Batch:
    ids, cut = random_tokens(1, length, vocabulary, 2), length // 3
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    labels = ids.clone()
    labels[0, cut] = IGNORED  # the document before would predict it
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions[None]}
    return Batch(inputs, ((0, range(cut)), (0, range(cut, length))))


def _padded(length: int, vocabulary: int) -> Batch:
    ids, before, after = random_tokens(2, length, vocabulary, 3), 6, 4
    mask = torch.ones_like(ids)
    mask[0, :before], mask[1, -after:] = 0, 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, before] = IGNORED  # padding would predict it
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return Batch(inputs, ((0, range(before, length)), (1, range(length - after))))


def _masked(length: int, vocabulary: int) -> Batch:
    batch = _one(length, vocabulary)
    batch.inputs["labels"][:, : length // 2] = IGNORED
    return batch


def _early(length: int, vocabulary: int, ranks: int) -> Batch:
    """Targets among the first tokens, so that most ranks of any layout of spans have none."""
    batch = _one(length, vocabulary)
    batch.inputs["labels"][:, max(2, length // (4 * ranks)) :] = IGNORED
    return batch


def _tree(length: int, vocabulary: int) -> Batch:
    """Return a tree: a third begins it, two branches come after it, and two more after the second of these."""
    ids = random_tokens(1, length, vocabulary, 7)
    cuts = [length // 3, length // 5, length // 6, length // 7]
    lengths = torch.tensor([*cuts, length - sum(cuts)])
    parents = torch.tensor([-1, 0, 0, 2, 2])
    starts = [0, *lengths.cumsum(0).tolist()]
    segments = [range(*starts[at : at + 2]) for at in range(len(lengths))]
    inputs = {
        "input_ids": ids,
        "labels": ids.clone(),
        "segment_lengths": lengths,
        "segment_parents": parents,
    }
    branches = ((0, 1), (0, 2, 3), (0, 2, 4))
    paths = [[p for s in branch for p in segments[s]] for branch in branches]
    return Batch(inputs, tuple((0, path) for path in paths))
