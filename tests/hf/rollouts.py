"""TRL's trainers that make completions, on made-up prompts, on a ring and on one process."""

import random
from typing import Any

import datasets
import torch
from peft import LoraConfig
from trl import (  # pyright: ignore[reportPrivateImportUsage]
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from ringspan.hf import RingConfig, RingGRPOTrainer, RingRLOOTrainer
from tests.hf.preferences import words
from tests.hf.trainers import VOCABULARY, arguments, made, tokenizer

# Arguments of a trainer itself.
OWN = ("rollout_func", "reward_funcs", "reward_processing_classes")


def prompts(count: int, seed: int) -> datasets.Dataset:
    draw = random.Random(seed)
    return datasets.Dataset.from_list(
        [{"prompt": words(draw, 13)[1:]} for _ in range(count)]
    )


def large_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs from completion to completion."""
    return [sum(ids) / (VOCABULARY * len(ids)) for ids in completion_ids]


def short_words(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [1 / len(ids) if ids[0] % 5 else None for ids in completion_ids]


def fixed(asked: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of two to twelve words: always the same for the same place among those of a prompt."""
    completions = []
    for place, prompt in enumerate(asked):
        here = asked.count(prompt)
        # Where replicas share a prompt, theirs follow one another.
        first = (
            trainer.accelerator.process_index * here
            if here < trainer.num_generations
            else 0
        )
        draw = random.Random(f"{prompt} {first + asked[:place].count(prompt)}")
        completions.append(
            [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(1, 12))] + [1]
        )
    ids = [tokenizer()(prompt)["input_ids"] for prompt in asked]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def rollout(
    kinds: tuple[Any, Any, Any],
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    given: dict[str, Any],
) -> Any:
    """TRL's trainer, or the one on a ring, made. ``given`` may have ``lora``, ``sampled``, for completions of the model
    itself, ``place``, a folder with the model, and ``OWN``.
    """
    torch.manual_seed(0)
    config, plain, on_ring = kinds
    options = {
        "bf16": False,
        "num_generations": 2,
        "dataloader_drop_last": True,
    } | given
    lora, sampled, place = (
        options.pop("lora", False),
        options.pop("sampled", False),
        options.pop("place", None),
    )
    options.setdefault("max_completion_length", 6 if sampled else 12)
    if lora:  # adapters begin at zero, so that all of a weight is what Adam made of gradients, and of their rounding
        options.setdefault("adam_epsilon", 0.1)
    functions = {name: options.pop(name) for name in OWN if name in options}
    own: dict[str, Any] = {
        "model": place or made(model),
        "args": arguments(folder, config, **options),
    }
    own |= {"processing_class": tokenizer(), "reward_funcs": [large_words, short_words]}
    own |= {"train_dataset": prompts(40, 0), "eval_dataset": prompts(6, 1)} | functions
    if not sampled:
        own.setdefault("rollout_func", fixed)
    if lora:
        own["peft_config"] = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "up_proj"]
        )
    return (
        plain(**own)
        if ring is None
        else on_ring(**own, ring=RingConfig(mesh=mesh, **ring))
    )


def grpo(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    """GRPO of fixed completions, unless they are ``sampled``."""
    return rollout(
        (GRPOConfig, GRPOTrainer, RingGRPOTrainer), mesh, model, ring, folder, options
    )


def rloo(
    mesh: Any,
    model: str,
    ring: dict[str, Any] | None,
    folder: str,
    options: dict[str, Any],
) -> Any:
    """RLOO of sampled completions: it takes none that are given."""
    return rollout(
        (RLOOConfig, RLOOTrainer, RingRLOOTrainer),
        mesh,
        model,
        ring,
        folder,
        {"sampled": True} | options,
    )
