"""transformers' Trainer of classifiers on a ring is the one on one process, with its labels and metrics."""

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
)

from ringspan.hf import RingConfig
from tests.cases import long
from tests.hf.trainers import VOCABULARY, Ring, arguments, close, history
from tests.torch.models import config as config_of

LABELS = 3


class Labelled(Dataset[dict[str, Tensor]]):
    """Texts of 1 to 23 tokens, padded on the right, with a label each; or each token with one, or none."""

    def __init__(self, count: int, seed: int, *, of_tokens: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCABULARY, (count, 23), generator=draw)
        self.mask = (
            torch.arange(23) < torch.randint(1, 24, (count, 1), generator=draw)
        ).long()
        self.ids[self.mask == 0] = 0
        self.labels = self.ids % LABELS
        if of_tokens:  # those of a few tokens are all on one rank
            self.labels[
                (self.mask == 0)
                | (torch.arange(23) > torch.randint(0, 23, (count, 1), generator=draw))
            ] = -100
        else:
            self.labels = self.labels[:, 0]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def metrics(prediction: Any) -> dict[str, float]:
    """A number that knows the place of each logit that has a label."""
    logits, labels = prediction.predictions, prediction.label_ids
    counted = (
        np.cos(np.arange(logits.size)).reshape(logits.shape) * (labels >= 0)[..., None]
    )
    return {
        "sum": float((logits * counted).mean()),
        "labels": float((labels * (labels >= 0)).sum()),
    }


def classify(
    mesh: Any,
    ring: dict[str, Any] | None,
    of_tokens: bool,
    model: str,
    options: dict[str, Any],
) -> Any:
    torch.manual_seed(0)
    auto: Any = (
        AutoModelForTokenClassification
        if of_tokens
        else AutoModelForSequenceClassification
    )
    made = auto.from_config(
        config_of(model, num_labels=LABELS, pad_token_id=0, classifier_dropout=0.0)
    ).float()
    data = [
        Labelled(count, seed, of_tokens=of_tokens) for seed, count in enumerate((40, 8))
    ]
    given = {
        "model": made,
        "train_dataset": data[0],
        "eval_dataset": data[1],
        "compute_metrics": metrics,
    }
    with tempfile.TemporaryDirectory() as folder:
        given["args"] = arguments(folder, **{"max_steps": 3} | options)
        trainer = (
            Trainer(**given)
            if ring is None
            else Ring(**given, ring=RingConfig(mesh=mesh, **ring))
        )
        trainer.train()
        evaluated = trainer.evaluate()
        return history(trainer), [evaluated["eval_sum"], evaluated["eval_labels"]]


@pytest.mark.parametrize(
    ("of_tokens", "model", "ranks", "replicas"),
    [
        (False, "qwen3-window", 4, 2),
        # replicas would take the mean of their batches' means, as without a ring
        *long((True, "llama", 2, 1)),
    ],
    ids=["sequences on two rings", "tokens"],
)
def test_classifiers_are_trained_as_on_one_process(
    world, of_tokens, model, ranks, replicas
):
    sizes = dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), 2 * replicas
    )
    expected, measured = classify(None, None, of_tokens, model, sizes)
    assert len(expected["loss"]) == 3 and len(expected["eval_loss"]) == 1
    for found, values in world(ranks).run(
        classify, ranks, {}, of_tokens, model, {}, replicate=replicas
    ):
        close(found, expected)
        assert values == pytest.approx(measured, rel=1e-4)
