"""An accelerate loop on a ring: only the line that creates the accelerator, with ``ring_accelerator``, changes.

    accelerate launch --multi_gpu --num_processes 4 examples/accelerate_loop.py

It makes its own model and data.
"""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ringspan.hf import RingConfig, ring_accelerator

VOCABULARY = 64


def counting(examples: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count from anywhere, and begin anew behind the last number."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (examples, 1), generator=draw)
    rows = (starts + torch.arange(length)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--length",
        type=int,
        default=512,
        help="tokens of a sequence, over the whole ring",
    )
    parser.add_argument(
        "--replicate", type=int, default=1, help="rings that take different sequences"
    )
    parser.add_argument(
        "--output", default="runs/accelerate", help="where the state goes"
    )
    arguments = parser.parse_args()

    accelerator = ring_accelerator(RingConfig(replicate=arguments.replicate))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=arguments.length,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(counting(arguments.steps * arguments.replicate, arguments.length))  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(arguments.output)
    accelerator.print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; on {dist.get_world_size()} ranks"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
