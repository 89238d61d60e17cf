"""Batches of each form that ``shard_batch`` takes, and the same tokens as documents of their own."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ringspan.core.geometry.tree import Tree
from tests.torch.mechanisms.trees.test_tree import branches

VOCABULARY: Final = 96  # smaller than the models', and even
NONE: Final = -100


class Document(NamedTuple):
    """Tokens that see each other; what each predicts and how much it counts; their places in the batch's targets."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    row: int
    places: Tensor
    padding: int = 0  # tokens before it, which transformers counts in positions


class Batch(NamedTuple):
    whole: dict[str, Tensor]  # for ``shard_batch``
    documents: list[Document]
    shape: tuple[int, int]
    prefix_loss: str = "once"

    @property
    def num_targets(self) -> float:
        return float(
            sum(
                document.weights[document.targets != NONE].sum()
                for document in self.documents
            )
        )


def _ids(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(
        3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def _labels(ids: Tensor, few: bool) -> Tensor:
    return ids.masked_fill(ids % 3 > 0, NONE) if few else ids.clone()


def _document(
    ids: Tensor, labels: Tensor, row: int, start: int, stop: int, padding: int = 0
) -> Document:
    """The tokens of a row from start to stop, each of which predicts the next of the row."""
    after = torch.cat([labels[row], torch.tensor([NONE])])
    weights = torch.ones(stop - start, dtype=torch.float64)
    places = torch.arange(start, stop)
    return Document(
        ids[row, start:stop], after[start + 1 : stop + 1], weights, row, places, padding
    )


def _rows(length: int, seed: int, few: bool, rows: int = 2) -> Batch:
    ids = _ids(rows, length, seed)
    labels = _labels(ids, few)
    documents = [_document(ids, labels, row, 0, length) for row in range(rows)]
    return Batch({"input_ids": ids, "labels": labels}, documents, (rows, length))


def _row(length: int, seed: int, few: bool) -> Batch:
    return _rows(length, seed, few, 1)


def _lengths(length: int, seed: int) -> list[int]:
    first = 1 + seed % (length - 3)
    second = 1 + (7 * seed) % (length - first - 1)
    return [first, second, length - first - second]


def _packed(length: int, seed: int, few: bool) -> Batch:
    ids = _ids(2, length, seed)
    labels, positions, documents = (
        _labels(ids, few),
        torch.zeros_like(ids),
        list[Document](),
    )
    for row in range(2):
        start = 0
        for count in _lengths(length, seed + row):
            positions[row, start : start + count] = torch.arange(count)
            documents.append(_document(ids, labels, row, start, start + count))
            start += count
    return Batch(
        {"input_ids": ids, "labels": labels, "position_ids": positions},
        documents,
        (2, length),
    )


def _flattened(length: int, seed: int, few: bool) -> Batch:
    ids, lengths = _ids(1, length, seed), _lengths(length, seed)
    labels = _labels(ids, few)
    stops = torch.tensor([0, *lengths]).cumsum(0).int()
    documents = [_document(ids, labels, 0, int(a), int(b)) for a, b in pairwise(stops)]
    whole = {
        "input_ids": ids,
        "labels": labels,
        "cu_seq_lens_q": stops,
        "cu_seq_lens_k": stops,
    }
    return Batch(whole, documents, (1, length))


def _padded(length: int, seed: int, few: bool, *, left: bool) -> Batch:
    ids = _ids(2, length, seed)
    labels, mask = _labels(ids, few), torch.ones_like(ids)
    missing = 1 + seed % (length // 2)
    gone = slice(0, missing) if left else slice(length - missing, length)
    mask[1, gone], labels[1, gone], ids[1, gone] = 0, NONE, 0
    if left:
        labels[1, missing] = NONE  # padding would predict it
    start, stop = (missing, length) if left else (0, length - missing)
    documents = [
        _document(ids, labels, 0, 0, length),
        _document(ids, labels, 1, start, stop, padding=missing if left else 0),
    ]
    return Batch(
        {"input_ids": ids, "labels": labels, "attention_mask": mask},
        documents,
        (2, length),
    )


def _tree(length: int, seed: int, few: bool, prefix_loss: str = "once") -> Batch:
    first, second, third = _lengths(length, seed)
    tree = Tree((first, second, 5, third, 2), (-1, 0, 0, 1, 1))
    ids = _ids(1, sum(tree.lengths), seed)
    labels = _labels(ids, few)
    documents, rows = [], branches(tree)
    for places, numbers in rows:
        shares = torch.tensor(
            [sum(number in other for _, other in rows) for number in numbers],
            dtype=torch.float64,
        )
        weights = torch.ones(len(places), dtype=torch.float64)
        if prefix_loss == "once":
            weights[:-1] = 1 / shares[1:]
        targets = torch.cat([labels[0, places[1:]], torch.tensor([NONE])])
        # Their log-probabilities are at the tokens themselves.
        documents.append(
            Document(
                ids[0, places], targets, weights, 0, torch.cat([places[1:], places[:1]])
            )
        )
    lengths, parents = (torch.tensor(numbers) for numbers in tree)
    whole = {
        "input_ids": ids,
        "labels": labels,
        "segment_lengths": lengths,
        "segment_parents": parents,
    }
    return Batch(whole, documents, (1, sum(tree.lengths)), prefix_loss)


FORMS: Final[dict[str, Callable[[int, int, bool], Batch]]] = {
    "row": _row,
    "rows": _rows,
    "packed": _packed,
    "flattened": _flattened,
    "padded right": lambda *asked: _padded(*asked, left=False),
    "padded left": lambda *asked: _padded(*asked, left=True),
    "tree": _tree,
    "tree, each": lambda *asked: _tree(*asked, prefix_loss="each"),
}


def batch_of(form: str, length: int, few: bool, *numbers: int) -> Batch:
    """The batch of a step, a part of it and a replica: other tokens and another length for each."""
    seed = 1 + sum(
        number * factor for number, factor in zip(numbers, (97, 31, 7), strict=False)
    )
    changed = max(8, length - 3 * (sum(numbers[:2]) % 4))
    return FORMS[form](changed, seed, few)


def summed_loss(
    model: Any, batch: Batch, z_loss: float = 0.0, smoothing: float = 0.0
) -> Tensor:
    """The loss of a batch's documents, each of them alone, by what each target counts."""
    total: Any = 0.0
    for document in batch.documents:
        scores = _logits(model, document)
        norm = scores.logsumexp(-1)
        is_target = document.targets != NONE
        target = scores.gather(1, document.targets.clamp_min(0)[:, None])[:, 0]
        each = (
            norm
            - (1 - smoothing) * target
            - smoothing * scores.mean(-1)
            + z_loss * norm.square()
        )
        total = total + (each * document.weights.to(each.dtype))[is_target].sum()
    return total


@torch.no_grad()
def log_probabilities(model: Any, batch: Batch) -> Tensor:
    found = torch.zeros(batch.shape, dtype=torch.float64)
    for document in batch.documents:
        each = (
            _logits(model, document)
            .log_softmax(-1)
            .gather(1, document.targets.clamp_min(0)[:, None])[:, 0]
        )
        is_target = document.targets != NONE
        found[document.row, document.places[is_target]] = each[is_target].double()
    return found


def _logits(model: Any, document: Document) -> Tensor:
    padding = torch.zeros(document.padding, dtype=torch.int64)
    row = torch.cat([padding, document.tokens])[None]
    asked: dict[str, Any] = {"input_ids": row, "use_cache": False}
    if document.padding:
        asked["attention_mask"] = (
            torch.arange(row.shape[1]) >= document.padding
        ).long()[None]
    return model(**asked).logits[0, document.padding :]
