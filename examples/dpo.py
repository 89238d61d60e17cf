"""Teach a model which of two answers is better with TRL's DPOTrainer, sequences split over all processes.

    python examples/dpo.py                                  # one process
    torchrun --nproc-per-node 4 examples/dpo.py             # a ring of four
    torchrun --nproc-per-node 4 examples/dpo.py --replicate 2 --model Qwen/Qwen3-0.6B --max-length 32768

Without ``--model`` it trains a tiny one, on pairs that it makes up: of two sums one is right. The reference model, the
weights of the beginning, is split over the same ring.
"""

import argparse
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig

from ringspan.hf import RingConfig, RingDPOTrainer


def pairs(count: int) -> Dataset:
    """Prompts with a right answer and a wrong one."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        a, b = draw.randrange(5), draw.randrange(5)
        wrong = (a + b + draw.randrange(1, 9)) % 9
        rows.append(
            {
                "prompt": f"{a} + {b} =",
                "chosen": f" {a + b} .",
                "rejected": f" {wrong} .",
            }
        )
    return Dataset.from_list(rows)


def tiny() -> tuple[Any, Any]:
    """A model of two layers and a tokenizer of numbers and signs."""
    words = ["<pad>", "<end>", "+", "=", ".", *map(str, range(9))]
    backend = Tokenizer(
        WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>"
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config), tokenizer


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate and save; the share of pairs whose right answer the model now prefers."""
    parser = argparse.ArgumentParser(
        description="Learn which of two answers is better, on pairs that it makes up."
    )
    parser.add_argument(
        "--model", help="name or folder of a model; a tiny one of its own when left out"
    )
    parser.add_argument("--output", default="runs/dpo", help="folder for the model")
    parser.add_argument(
        "--max-length",
        type=int,
        default=128,
        help="tokens of a prompt and its answer, at most",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--replicate", type=int, default=1, help="rings that take different examples"
    )
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    if given.model is None:
        model, tokenizer = tiny()
    else:
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(given.model),
            AutoTokenizer.from_pretrained(given.model),
        )
    data = pairs(2000).train_test_split(test_size=200, seed=0)
    trainer = RingDPOTrainer(
        model=model,
        ref_model=deepcopy(model),
        processing_class=tokenizer,
        args=DPOConfig(
            given.output,
            max_length=given.max_length,
            max_steps=given.steps,
            beta=0.1,
            learning_rate=3e-3 if given.model is None else 1e-6,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=50,
            bf16=given.model is not None,
            use_cpu=not torch.accelerator.is_available(),
            logging_steps=10,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        ring=RingConfig(replicate=given.replicate),
    )
    trainer.train()
    preferred = trainer.evaluate()["eval_rewards/accuracies"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(
            f"prefers the right answer in {preferred:.0%} of new pairs, model in {Path(given.output).resolve()}"
        )
    return preferred


if __name__ == "__main__":
    main()
