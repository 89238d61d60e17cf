"""Batches that a proof tries, whole, and as rows that a plain model computes one by one."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ringspan.proof.small import VOCABULARY
from ringspan.torch.data.padding import IGNORED

_FIRST_TOKEN: Final = 3  # after those that begin, end and pad


class Batch(NamedTuple):
    """A batch of rows: ``inputs`` for ``shard_batch``, and the parts (row, start, stop) that see nothing else."""

    inputs: dict[str, Tensor]
    parts: tuple[tuple[int, int, int], ...]

    @property
    def real(self) -> Tensor:
        """Mask (B, S) of tokens that are not padding."""
        mask = self.inputs.get("attention_mask")
        return (
            torch.ones_like(self.inputs["input_ids"]) > 0 if mask is None else mask > 0
        )


def batches(ranks: int, folds: int = 1) -> dict[str, Batch]:
    """Return the batches of a proof by their names, for rings of ``ranks``; their tokens do not divide by the ranks."""
    length = 24 * ranks * folds + 5
    return {
        "one sequence": _one(length),
        "packed documents": _packed(length),
        "padding on both sides": _padded(length),
        "labels masked at the start": _masked(length),
        "a rank without targets": _early(length, ranks),
    }


def _tokens(rows: int, length: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(_FIRST_TOKEN, VOCABULARY, (rows, length), generator=random)


def _one(length: int) -> Batch:
    ids = _tokens(1, length, 1)
    return Batch({"input_ids": ids, "labels": ids.clone()}, ((0, 0, length),))


def _packed(length: int) -> Batch:
    ids, cut = _tokens(1, length, 2), length // 3
    positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    labels = ids.clone()
    labels[0, cut] = IGNORED  # the document before would predict it
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions[None]}
    return Batch(inputs, ((0, 0, cut), (0, cut, length)))


def _padded(length: int) -> Batch:
    ids, before, after = _tokens(2, length, 3), 6, 4
    mask = torch.ones_like(ids)
    mask[0, :before], mask[1, -after:] = 0, 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, before] = IGNORED  # padding would predict it
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return Batch(inputs, ((0, before, length), (1, 0, length - after)))


def _masked(length: int) -> Batch:
    batch = _one(length)
    batch.inputs["labels"][:, : length // 2] = IGNORED
    return batch


def _early(length: int, ranks: int) -> Batch:
    """Targets among the first tokens, so that most ranks of any layout of spans have none."""
    batch = _one(length)
    batch.inputs["labels"][:, max(2, length // (4 * ranks)) :] = IGNORED
    return batch
