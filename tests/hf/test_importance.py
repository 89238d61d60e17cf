"""Completions are drawn from the very numbers that training computes: the importance ratio of a first step is 1."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from ringspan.hf import RingGRPOTrainer
from tests.cases import long
from tests.hf.rollouts import rollout

TEMPERATURE = 0.7


@contextmanager
def watched(model: Any) -> Iterator[list[Tensor]]:
    """While a model generates: the log-probability (B, tokens) that each new token was drawn with."""
    found: list[Tensor] = []

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        made = type(model).generate(model, *args, **kwargs, output_logits=True, return_dict_in_generate=True)
        logits = torch.stack(made.logits, 1).float() / TEMPERATURE
        new = made.sequences[:, -logits.shape[1] :]
        found.append(logits.log_softmax(-1).gather(-1, new[..., None])[..., 0])
        return made.sequences

    model.generate = generate
    try:
        yield found
    finally:
        del model.generate


class Watching(RingGRPOTrainer):
    """Keeps the ratio of each token of a completion, between what it was drawn with and what training computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ratios: list[Tensor] = []

    def _generate_single_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with watched(self.model) as found:
            completions, _ = super()._generate_single_turn(*args, **kwargs)
        rows = zip(completions, found[0].tolist(), strict=True)
        return completions, [drawn[: len(ids)] for ids, drawn in rows]

    def _get_per_token_logps_and_entropies(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.trained = result[0].detach()
        return result

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        before = inputs["sampling_per_token_logps" if self.rollout_func is None else "old_per_token_logps"]
        self.ratios.append((self.trained - before).exp()[inputs["completion_mask"] == 1])
        return loss


def ratios(mesh: Any, options: dict[str, Any]) -> list[Tensor]:
    """Of three steps of two accumulated batches, by batch."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"max_steps": 3, "beta": 0.0, "temperature": TEMPERATURE}
        kinds = GRPOConfig, GRPOTrainer, Watching
        trainer = rollout(kinds, mesh, "qwen3-window", {}, folder, common | options)
        trainer.train()
        return trainer.ratios


# TRL computes log-probabilities of given completions where they serve more steps than one.
@pytest.mark.parametrize(
    ("ranks", "tp", "options", "steps"),
    [
        (2, 1, {"sampled": True}, (1, 2, 3)),
        *long((4, 2, {"sampled": True}, (1, 2, 3)), (2, 1, {"num_iterations": 2}, (1, 3))),
    ],
    ids=["made on the ring", "made on the ring, heads split", "given"],
)
def test_the_ratio_of_a_first_step_is_one(world, ranks, tp, options, steps):
    for found in world(ranks).run(ratios, ranks, options, tp=tp):
        assert len(found) == 6 and min(len(batch) for batch in found) > 2
        away = [float((batch - 1).abs().max()) for batch in found]
        for step in (1, 2, 3):
            apart = max(away[2 * step - 2 : 2 * step])
            assert apart < 1e-5 if step in steps else apart > 1e-3
