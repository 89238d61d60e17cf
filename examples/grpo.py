"""Reinforce what a function rewards with TRL's GRPOTrainer, sequences split over all processes.

    python examples/grpo.py                                 # one process
    torchrun --nproc-per-node 4 examples/grpo.py            # a ring of four
    torchrun --nproc-per-node 4 examples/grpo.py --replicate 2 --model Qwen/Qwen3-0.6B --max-new 8192

Without ``--model`` it trains a tiny one, rewarded for repeating the number in its prompt. The ring also
generates the completions, from the same weights and arithmetic that training uses. With ``--server`` and
``--weights`` a vLLM server generates them (docs/how-to/vllm.md); examples/cluster starts both.
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
from trl import GRPOConfig

from ringspan.hf import RingConfig, RingGRPOTrainer

NUMBERS = 4


def prompts(count: int) -> Dataset:
    """Requests for a number."""
    draw = random.Random(0)
    return Dataset.from_list(
        [{"prompt": f"repeat {draw.randrange(NUMBERS)} :"} for _ in range(count)]
    )


def repeated(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of an answer's words that are the number asked for."""
    asked, given = (
        [prompt.split()[1] for prompt in prompts],
        [text.split() for text in completions],
    )
    return [
        words.count(number) / max(len(words), 1)
        for number, words in zip(asked, given, strict=True)
    ]


def tiny() -> tuple[Any, Any]:
    """A model of two layers and a tokenizer of numbers."""
    words = ["<pad>", "<end>", "repeat", ":", *map(str, range(NUMBERS))]
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


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and save; the mean reward of each step."""
    parser = argparse.ArgumentParser(
        description="Reinforce answers that repeat a number."
    )
    parser.add_argument(
        "--model", help="name or folder of a model; a tiny one of its own when left out"
    )
    parser.add_argument("--output", default="runs/grpo", help="folder for the model")
    parser.add_argument(
        "--max-new", type=int, default=6, help="tokens of a completion, at most"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--replicate", type=int, default=1, help="rings that take different prompts"
    )
    parser.add_argument("--server", help="URL of a vLLM server with this --model")
    parser.add_argument(
        "--weights", help="folder that trainer and server see, for new weights"
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
    trainer = RingGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=repeated,
        args=GRPOConfig(
            given.output,
            max_completion_length=given.max_new,
            num_generations=8,
            max_steps=given.steps,
            learning_rate=3e-3 if given.model is None else 1e-6,
            per_device_train_batch_size=32,
            bf16=given.model is not None,
            use_cpu=not torch.accelerator.is_available(),
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_vllm=given.server is not None,
            vllm_mode="server",
            vllm_server_base_url=given.server,
            vllm_server_timeout=1800,  # a large model is read for minutes
            vllm_importance_sampling_mode="token_truncate",
        ),
        train_dataset=prompts(2000),
        ring=RingConfig(replicate=given.replicate, vllm_weights_folder=given.weights),
    )
    trainer.train()
    trainer.save_model()
    rewards = [step["reward"] for step in trainer.state.log_history if "reward" in step]
    if trainer.is_world_process_zero():
        print(
            f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}, model in {Path(given.output).resolve()}"
        )
    return rewards


if __name__ == "__main__":
    main()
