"""Fine-tune a model with TRL's SFTTrainer, its sequences split over all processes that are launched.

    python examples/sft.py                                  # one process
    torchrun --nproc-per-node 4 examples/sft.py             # a ring of four
    torchrun --nproc-per-node 4 examples/sft.py --replicate 2 --model Qwen/Qwen3-0.6B --max-length 131072

Without ``--model`` it trains a tiny one, on conversations that it makes up: each asks for the sum of two numbers.
Conversations are packed, and no one of them sees another.
"""

import argparse
import random
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
from trl import SFTConfig

from ringspan.hf import RingConfig, RingSFTTrainer


def conversations(count: int) -> Dataset:
    """Prompts and completions; only the completions have targets."""
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": f"{a} + {b} =", "completion": f" {a + b} ."} for a, b in pairs]
    )


def tiny() -> tuple[Any, Any]:
    """A model of two layers and a tokenizer of numbers and signs."""
    words = ["<pad>", "<end>", "+", "=", ".", *map(str, range(20))]
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
    """Train, evaluate and save; the loss of evaluation."""
    parser = argparse.ArgumentParser(
        description="Fine-tune on conversations that it makes up."
    )
    parser.add_argument(
        "--model", help="name or folder of a model; a tiny one of its own when left out"
    )
    parser.add_argument("--output", default="runs/sft", help="folder for the model")
    parser.add_argument(
        "--max-length",
        type=int,
        default=128,
        help="tokens that conversations are packed into",
    )
    parser.add_argument("--steps", type=int, default=60)
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
    data = conversations(2000).train_test_split(test_size=200, seed=0)
    trainer = RingSFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(
            given.output,
            max_length=given.max_length,
            max_steps=given.steps,
            packing=True,
            learning_rate=3e-3 if given.model is None else 1e-5,
            per_device_train_batch_size=4,
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
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"evaluation loss {loss:.3f}, model in {Path(given.output).resolve()}")
    return loss


if __name__ == "__main__":
    main()
