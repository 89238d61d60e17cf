"""Batches balanced over replicas: examples of similar work go to all at the same time."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler
from transformers.trainer_utils import has_length

from ringspan.core.errors import UnsupportedError
from ringspan.core.sharing import even_out, worth_of_sharing
from ringspan.hf.batches import classifies
from ringspan.hf.seams import method_behind

_log: Final = logging.getLogger(__name__)
# These ``compute_loss`` divide a sum over targets by the step's number of targets, not by the micro-batch's own.
_COUNTED: Final = frozenset(
    {"transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer"}
)


class EvenSampler(Sampler[int]):
    """Another sampler's examples, evened within steps of ``shape`` (micro-steps, replicas, examples per replica)."""

    def __init__(
        self, base: Any, work: Callable[[int], int], shape: tuple[int, int, int]
    ) -> None:
        self._base, self._work, self._shape = base, work, shape
        self._has_said = False

    def __len__(self) -> int:
        return len(self._base)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._base, "set_epoch"):
            self._base.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        step: list[int] = []
        for index in self._base:
            step.append(index)
            if len(step) == np.prod(self._shape):
                work = np.array(
                    [self._work(index) for index in step], np.int64
                ).reshape(self._shape)
                places = even_out(work)
                self._say(work, places)
                yield from (step[place] for place in places.ravel())
                step = []
        yield from step

    def _say(self, work: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        if self._has_said:
            return
        moved, after, before = worth_of_sharing(work[None], places[None])
        self._has_said = moved > 0
        if moved and (not dist.is_initialized() or dist.get_rank() == 0):
            _log.warning(
                "balance='flops' moves examples within their steps, of the first such step %.0f%%: the busiest replica "
                "computes %.3f of the mean, %.3f without",
                *(100 * moved, after, before),
            )


def balance_steps(trainer: Any, loader: Any) -> None:
    """Distribute a trainer's examples by their work, in place; raise if that would change its loss."""
    data: Any = trainer.train_dataset
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if sampler is None or not has_length(trainer.train_dataset):
        raise UnsupportedError(
            "balance='flops' needs a data set with a length, not a stream; leave it out"
        )
    if getattr(trainer.model.config.get_text_config(), "output_router_logits", False):
        raise UnsupportedError(
            "balance='flops' moves examples between micro-steps, each of which has a router's loss of its own with "
            "output_router_logits=True; leave one of the two out"
        )
    lengths_of(data[0])
    if (what := _uncounted(trainer)) is not None:
        raise UnsupportedError(
            f"balance='flops' moves examples between micro-steps, which changes {what}; leave one of the two out"
        )
    shape = (
        trainer.args.gradient_accumulation_steps,
        trainer.accelerator.num_processes,
        trainer._train_batch_size,
    )
    loader.set_sampler(EvenSampler(sampler, work_of(trainer), shape))


def _uncounted(trainer: Any) -> str | None:
    """Return the name of a loss that is not a sum over a step's targets divided by their number, or None."""
    method = method_behind(trainer, "compute_loss")
    owner = f"{method.__module__}.{method.__qualname__}".removesuffix(".compute_loss")
    if classifies(trainer.model):
        return "a classifier's loss, a mean over each micro-batch"
    if callable(trainer.compute_loss_func):
        return "the loss of a compute_loss_func"
    return (
        None
        if owner in _COUNTED
        else f"the loss of {owner.rpartition('.')[2]}.compute_loss"
    )


def work_of(trainer: Any) -> Callable[[int], int]:
    """Return an example's cost in (query, key) pairs: causal attention, plus tokens times the rest.

    A forward pass takes 4 C FLOPs per pair and layer (C hidden size, all heads) and 2 per token and weight.
    """
    config = trainer.model.config.get_text_config()
    data: Any = trainer.train_dataset
    embeddings = sum(
        weight.numel() for weight in trainer.model.get_input_embeddings().parameters()
    )
    per_token = (
        2
        * (trainer.model.num_parameters() - embeddings)
        // (4 * config.hidden_size * config.num_hidden_layers)
    )

    def work(index: int) -> int:
        return sum(
            length * (length + 1) // 2 + length * per_token
            for length in lengths_of(data[index])
        )

    return work


def lengths_of(example: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the lengths of an example's documents (several if TRL packed it); UnsupportedError without tokens."""
    if "seq_lengths" in example:
        return list(example["seq_lengths"])
    if "input_ids" not in example:
        raise UnsupportedError(
            f"balance='flops' needs input_ids in each example, found {', '.join(example)}; leave it out"
        )
    return [len(example["input_ids"])]
