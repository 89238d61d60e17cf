"""transformers' Trainer on a ring, with images in its batches as the collators of processors give them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Trainer

from ringspan.hf import RingConfig
from tests.cases import long
from tests.hf.trainers import Ring, arguments, check, train
from tests.torch.mechanisms.media.models import Example, batch_of, build

EXAMPLES: list[Example] = [[3, "i", 4], [2, "i", 1, "i", 3], [9], [1, "i", 7]]
PADDED = {"input_ids": 2, "labels": -100, "mm_token_type_ids": 0}


class Pictures(Dataset[dict[str, Tensor]]):
    """Examples with one image, two, or none."""

    def __init__(self, kind: str, count: int, seed: int) -> None:
        options = {"dtype": torch.float32}
        self.rows = [
            batch_of(kind, [EXAMPLES[row % 4]], seed=seed + row, **options)
            for row in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Text padded on the right; the images of all, one after the other."""
    found = {
        name: torch.cat([row[name] for row in rows if name in row])
        for name in _images(rows)
    }
    for name, value in PADDED.items():
        if name in rows[0]:
            found[name] = pad_sequence(
                [row[name][0] for row in rows], batch_first=True, padding_value=value
            )
    lengths = torch.tensor([row["input_ids"].shape[1] for row in rows])
    found["attention_mask"] = (
        torch.arange(int(lengths.max())) < lengths[:, None]
    ).long()
    return found


def _images(rows: list[dict[str, Tensor]]) -> list[str]:
    return sorted({name for row in rows for name in row} - {*PADDED})


def seeing(
    mesh: Any,
    kind: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    torch.manual_seed(0)
    given = {
        "model": build(kind, dtype=torch.float32),
        "args": arguments(folder, **options),
    }
    given |= {
        "train_dataset": Pictures(kind, 16, 0),
        "eval_dataset": Pictures(kind, 4, 100),
        "data_collator": collate,
    }
    return (
        Trainer(**given)
        if ring is None
        else Ring(**given, ring=RingConfig(mesh=mesh, **ring))
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "replicas"), [("qwen2_5_vl", 2, 1), *long(("llava", 4, 2))]
)
def test_steps_with_images_equal_one_process(world, kind, ranks, replicas):
    options = {"max_steps": 3, "remove_unused_columns": False}
    sizes = {
        "per_device_train_batch_size": 2 * replicas,
        "per_device_eval_batch_size": 2 * replicas,
    }
    expected = train(None, seeing, kind, None, options | sizes)
    assert len(expected["loss"]) == 3
    check(world, ranks, seeing, kind, options, expected, replicate=replicas)
