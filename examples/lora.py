"""LoRA on a ring: a small model learns to count, its weights stay as they are, and PEFT opens what was trained.

    torchrun --nproc-per-node 2 examples/lora.py

It makes its own model and data; with one of yours, only ``model`` and ``dataset`` change.
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs


def counting(
    examples: int, length: int, vocabulary: int
) -> list[dict[str, torch.Tensor]]:
    """Sequences that count from anywhere, and begin anew behind the last number."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(vocabulary, (examples, 1), generator=draw)
    rows = (starts + torch.arange(length)) % vocabulary
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
    parser.add_argument("--output", default="runs/lora", help="the adapter's folder")
    arguments = parser.parse_args()

    mesh = rs.init_mesh(replicate=arguments.replicate)
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.length,
    )
    base = LlamaForCausalLM(sizes)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=16,
        lora_alpha=32,
        target_modules="all-linear",
        modules_to_save=["lm_head"],
    )
    model = rs.parallelize(get_peft_model(base, lora), mesh)  # type: ignore[arg-type]

    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    dataset = counting(
        arguments.steps * arguments.replicate, arguments.length, sizes.vocab_size
    )
    losses = []
    for batch in rs.loader(dataset, mesh):  # type: ignore[arg-type]
        loss = model(**rs.shard_batch(batch, mesh)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(arguments.output)  # on every rank; rank 0 writes

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        opened = PeftModel.from_pretrained(LlamaForCausalLM(sizes), arguments.output)
        ids = dataset[-1]["input_ids"][None]
        with torch.no_grad():
            alone = opened(input_ids=ids, labels=ids).loss.item()
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; PEFT opens {arguments.output}: {alone:.3f} on the last sequence"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
