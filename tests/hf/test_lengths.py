"""Examples of mixed lengths, dealt by length: those of one process, in its order, and the same losses."""

import random
import tempfile
from typing import Any

import pytest
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.cases import long
from tests.hf.trainers import Examples, close, history, plain

STEPS, ACCUMULATED = 3, 2
# Enough of them that four examples and eight at once are dealt from like groups: 16 that are sorted by length.
COUNT, LONGEST = 64, 40
PADDED = {"input_ids": 0, "labels": -100, "attention_mask": 0}
Batch = list[tuple[int, ...]]


class Mixed(Examples):
    """Examples of 3 to 40 tokens."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, LONGEST, seed)
        draw = random.Random(seed)
        self.lengths = [draw.randrange(3, LONGEST + 1) for _ in range(count)]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            name: value[: self.lengths[index]]
            for name, value in super().__getitem__(index).items()
        }


class Noting:
    """A collator that pads on the right and keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches.append([tuple(row["input_ids"].tolist()) for row in rows])
        return {
            name: pad_sequence(
                [row[name] for row in rows], batch_first=True, padding_value=value
            )
            for name, value in PADDED.items()
        }


def trained(
    mesh: Any, ring: dict[str, Any] | None, options: dict[str, Any]
) -> tuple[dict[str, Any], list[Batch]]:
    """What is logged, and the examples of each batch that this process has trained on."""
    collate = Noting()
    given = {
        "train_dataset": Mixed(COUNT),
        "eval_dataset": Mixed(12, seed=1),
        "data_collator": collate,
    }
    given |= {
        "train_sampling_strategy": "group_by_length",
        "max_steps": STEPS,
    } | options
    given["gradient_accumulation_steps"] = ACCUMULATED
    with tempfile.TemporaryDirectory() as folder:
        trainer = plain(mesh, "llama", ring, folder, given)
        trainer.train()
        # accelerate's loader is one ahead
        batches = collate.batches[: STEPS * ACCUMULATED]
        trainer.evaluate()
        return history(trainer), batches


def padding(batches: list[Batch]) -> int:
    return sum(max(map(len, batch)) - len(row) for batch in batches for row in batch)


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), *long((2, 1))])
def test_what_is_grouped_by_length_is_that_of_one_process(world, ranks, replicas):
    sizes = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), 2 * replicas
    )
    expected, order = trained(None, None, sizes)
    _, unsorted = trained(None, None, sizes | {"train_sampling_strategy": "random"})
    assert padding(order) < padding(unsorted) / 2
    assert (
        len({len(row) for batch in order for row in batch}) > 8 and padding(order) > 0
    )
    results = world(ranks).run(trained, ranks, {}, {}, replicate=replicas)
    for rank, (found, batches) in enumerate(results):
        # of those that this rank's replica has of each batch
        first = 2 * (rank * replicas // ranks)
        assert batches == [batch[first : first + 2] for batch in order]
        close(found, expected)
