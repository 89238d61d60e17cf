"""Examples that are moved within their steps: replicas compute alike, and every step is what it was."""

import logging
import random
import tempfile
from itertools import islice
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.sharing import busiest_over_mean
from ringspan.hf import RingConfig, RingTrainerMixin, ring_accelerator
from ringspan.hf.balance import EvenSampler
from tests.cases import long
from tests.hf.preferences import dpo
from tests.hf.test_classes import classify
from tests.hf.test_trainer import Stream
from tests.hf.trainers import (
    TOLERANCE,
    Examples,
    arguments,
    differences,
    made,
    plain,
    sft,
    train,
)


class Epochs(list[int]):
    """Indices that know which epoch it is."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 2, 2), (2, 3, 1), (1, 1, 1)])
@pytest.mark.parametrize("count", [0, 1, 11, 24, 31])
def test_examples_stay_in_their_steps(shape, count):
    draw = random.Random(count)
    came = Epochs(draw.sample(range(100), count))
    sampler = EvenSampler(came, lambda index: index**2, shape)
    sampler.set_epoch(3)
    found, size = list(sampler), shape[0] * shape[1] * shape[2]
    assert len(sampler) == count and came.epoch == 3 and found == list(sampler)
    for start in range(0, count, size):
        step = came[start : start + size]
        assert sorted(found[start : start + size]) == sorted(step)
        assert len(step) == size or found[start:] == step


def test_what_works_at_the_same_time_is_alike():
    def apart(order: list[int]) -> int:
        return sum(
            abs(first - second)
            for first, second in zip(order[::2], order[1::2], strict=True)
        )

    came = [1, 90, 2, 80, 3, 70, 4, 60]
    assert (
        apart(list(EvenSampler(came, lambda index: index, (4, 2, 1))))
        == 1 + 1 + 10 + 10 + 0
        and apart(came) == 290
    )


STEPS = 3
EVEN = {"balance": "flops"}


def tokens_of_batches(mesh: Any, ring: dict[str, Any]) -> list[int]:
    """Real tokens of this rank's micro-batches in a few steps."""
    with tempfile.TemporaryDirectory() as folder:
        loader = sft(mesh, "llama", ring, folder, {}).get_train_dataloader()
        return [
            int((batch["labels"] != -100).sum()) for batch in islice(loader, 2 * STEPS)
        ]


@pytest.mark.long
def test_replicas_compute_alike(world):
    def dealt(ring: dict[str, Any]) -> Any:
        ranks = world(4).run(tokens_of_batches, 4, ring, replicate=2)
        assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
        return np.array([ranks[0], ranks[2]]).T.reshape(STEPS, 2, 2)

    came, even = dealt({}), dealt(EVEN)
    assert (came.sum((1, 2)) == even.sum((1, 2))).all()
    assert (
        busiest_over_mean(even[..., None])
        < 1 + (busiest_over_mean(came[..., None]) - 1) / 2
    )


@pytest.mark.parametrize("packing", [*long(False), True])
def test_steps_equal_one_process_that_moves_nothing(world, packing):
    options = {"max_steps": STEPS, "packing": packing}
    expected = train(
        None, sft, "llama", None, options | {"per_device_train_batch_size": 4}
    )
    for found in world(4).run(train, 4, sft, "llama", EVEN, options, replicate=2):
        apart = differences(found, expected)
        assert (
            max(
                apart[name]
                for name in ("loss", "grad_norm", "weights")
                if name in apart
            )
            < TOLERANCE
        )


def test_moved_examples_are_logged_once(caplog):
    """Of three steps of two micro-steps for two replicas, the first stays as it is."""
    with caplog.at_level(logging.WARNING, logger="ringspan"):
        came = [4, 3, 2, 1, 4, 1, 3, 2, 1, 2, 3, 4]
        assert (
            list(EvenSampler(came, lambda index: index, (2, 2, 1))) == [4, 3, 2, 1] * 3
        )
    assert caplog.messages == [
        "balance='flops' moves examples within their steps, of the first such step 75%: the busiest replica computes "
        "1.200 of the mean, 1.400 without"
    ]


class OwnLoss(Trainer):
    """With a mean of its own."""

    def compute_loss(
        self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        return super().compute_loss(*args, **kwargs)


class RingOwnLoss(RingTrainerMixin, OwnLoss):
    """On a ring."""


def own_loss(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> Any:
    given = {
        "model": made(model),
        "args": arguments(folder, max_steps=1),
        "train_dataset": Examples(8),
    }
    return RingOwnLoss(**given, ring=RingConfig(mesh=mesh, **ring))


def classifier(
    mesh: Any, model: str, ring: dict[str, Any], folder: str, options: dict[str, Any]
) -> Any:
    classify(mesh, ring, True, model, {"max_steps": 1})


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.mean()


def started(mesh: Any, make: Any, model: str, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make(mesh, model, EVEN, folder, options).train()


@pytest.mark.parametrize(
    ("make", "model", "options", "message"),
    [
        (
            plain,
            "llama",
            {"train_dataset": Stream(), "max_steps": 1},
            "needs a data set with a length",
        ),
        (
            plain,
            "llama",
            {"accelerator_config": {"split_batches": True}},
            "with split_batches=True is not supported",
        ),
        (plain, "mixtral+router", {}, "each of which has a router's loss of its own"),
        (
            classifier,
            "llama",
            {},
            "which changes a classifier's loss, a mean over each micro-batch; leave one",
        ),
        (
            own_loss,
            "llama",
            {},
            "which changes the loss of OwnLoss.compute_loss; leave one",
        ),
        (
            plain,
            "llama",
            {"compute_loss_func": mean},
            "changes the loss of a compute_loss_func; leave",
        ),
        (
            dpo,
            "llama",
            {},
            "needs input_ids in each example, found prompt, chosen, rejected",
        ),
    ],
    ids=["stream", "split", "router", "classifier", "own loss", "function", "pairs"],
)
def test_what_cannot_be_moved_raises(world, make, model, options, message):
    for error in world(2).outcomes(started, 2, make, model, options):
        assert isinstance(error, UnsupportedError) and message in str(error)


def test_a_balance_that_there_is_not_raises():
    with pytest.raises(ConfigError, match="balance='tokens'; use one of none, flops"):
        RingConfig(balance="tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedError, match="is for trainers"):
        ring_accelerator(RingConfig(balance="flops"))
