"""TRL's trainers on preferences, on made-up ones, on a ring and on one process."""

import random
from typing import Any

import datasets
import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification
from trl import (  # pyright: ignore[reportPrivateImportUsage]
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from ringspan.hf import (
    RingConfig,
    RingDPOTrainer,
    RingKTOTrainer,
    RingORPOTrainer,
    RingRewardTrainer,
)
from tests.hf.trainers import VOCABULARY, arguments, made, tokenizer
from tests.torch.models import build
from tests.torch.models import config as config_of


def words(draw: random.Random, most: int) -> str:
    """Up to so many words, with a blank before them."""
    return "".join(
        f" w{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randrange(1, most))
    )


def pairs(count: int, seed: int) -> datasets.Dataset:
    """Prompts with two answers each, of which some are one word and some longer than the prompt."""
    draw = random.Random(seed)
    rows = [
        {
            "prompt": words(draw, 12)[1:],
            "chosen": words(draw, 9) + " w1",
            "rejected": words(draw, 15) + " w1",
        }
        for _ in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def judged(count: int, seed: int) -> datasets.Dataset:
    """Prompts with an answer each, that is wanted or not."""
    rows = pairs(count, seed).to_list()
    label = [bool(number % 3) for number in range(count)]
    answers = [
        row["chosen"] if good else row["rejected"]
        for row, good in zip(rows, label, strict=True)
    ]
    return datasets.Dataset.from_dict(
        {
            "prompt": [row["prompt"] for row in rows],
            "completion": answers,
            "label": label,
        }
    )


def trainer_of(
    kinds: tuple[Any, Any, Any], data: Any, mesh: Any, model: Any, ring: dict[str, Any] | None, folder: str,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """TRL's trainer, or the one on a ring, made. ``options`` may have ``lora``, ``reference``, the seed of one, and
    ``place``, a folder with the model.
    """
    config, plain, on_ring = kinds
    options = {"bf16": False, "dataloader_drop_last": True} | options
    lora, reference, place = (
        options.pop("lora", False),
        options.pop("reference", None),
        options.pop("place", None),
    )
    given: dict[str, Any] = {"model": place or model, "processing_class": tokenizer()}
    given |= {"args": arguments(folder, config, **options)}
    given |= {"train_dataset": data(60, 0), "eval_dataset": data(12, 1)}
    if lora:
        task = "SEQ_CLS" if config is RewardConfig else "CAUSAL_LM"
        given["peft_config"] = LoraConfig(
            task_type=task, r=4, target_modules=["q_proj", "v_proj", "up_proj"]
        )
    if reference is not None:
        given["ref_model"] = build(model.config.model_type, seed=reference)
    return (
        plain(**given)
        if ring is None
        else on_ring(**given, ring=RingConfig(mesh=mesh, **ring))
    )


def dpo(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    """DPO; its reference model has other weights, unless an adapter is trained."""
    torch.manual_seed(0)
    options = ({} if options.get("lora") else {"reference": 5}) | options
    return trainer_of(
        (DPOConfig, DPOTrainer, RingDPOTrainer),
        pairs,
        mesh,
        made(model),
        ring,
        folder,
        options,
    )


class KTO(KTOTrainer):
    """KTO whose mismatched pairs are those of batches of two, however large its batches are."""

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        size, args.per_device_train_batch_size = args.per_device_train_batch_size, 2
        try:
            return super()._prepare_dataset(
                dataset, processing_class, args, dataset_name
            )
        finally:
            args.per_device_train_batch_size = size


def kto(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    """KTO, with a reference model of other weights, unless an adapter is trained."""
    torch.manual_seed(0)
    options = ({} if options.get("lora") else {"reference": 5}) | options
    return trainer_of(
        (KTOConfig, KTO, RingKTOTrainer),
        judged,
        mesh,
        made(model),
        ring,
        folder,
        options,
    )


def orpo(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    torch.manual_seed(0)
    return trainer_of(
        (ORPOConfig, ORPOTrainer, RingORPOTrainer),
        pairs,
        mesh,
        made(model),
        ring,
        folder,
        options,
    )


def compared(count: int, seed: int) -> datasets.Dataset:
    """Two texts each, the first the better one, by so much."""
    draw = random.Random(seed)
    tokens = [
        [
            [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(1, 13))]
            for _ in "abc"
        ]
        for _ in range(count)
    ]
    rows = [
        {
            "chosen_ids": both + first,
            "rejected_ids": both + second,
            "margin": draw.random(),
        }
        for both, first, second in tokens
    ]
    return datasets.Dataset.from_list(rows)


def reward(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    """A reward model, in float64 where ``options`` have ``double``."""
    torch.manual_seed(0)
    options = dict(options)
    made_one = AutoModelForSequenceClassification.from_config(
        config_of(model, num_labels=1)
    ).float()
    made_one = made_one.double() if options.pop("double", False) else made_one
    kinds = RewardConfig, RewardTrainer, RingRewardTrainer
    return trainer_of(
        kinds, compared, mesh, made_one, ring, folder, {"max_length": 24} | options
    )
