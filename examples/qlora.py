"""QLoRA on a ring: a model's weights are packed in 4 bits as they are read, adapters learn to count, 8-bit moments.

    torchrun --nproc-per-node 2 examples/qlora.py

It needs ``pip install '.[qlora]'`` in a checkout and makes its own model and data; with yours, only ``base`` and
``dataset`` change.
"""

import argparse
from pathlib import Path

import bitsandbytes
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import ringspan as rs


def counting(
    examples: int, length: int, vocabulary: int
) -> list[dict[str, torch.Tensor]]:
    """Sequences that count from anywhere, and begin again after the last number."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(vocabulary, (examples, 1), generator=draw)
    rows = (starts + torch.arange(length)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in rows]


def make_base(folder: Path, length: int) -> None:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)


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
        "--output",
        type=Path,
        default=Path("runs/qlora"),
        help="folder of the base and the adapter",
    )
    arguments = parser.parse_args()

    mesh = rs.init_mesh()
    base, adapter = arguments.output / "base", arguments.output / "adapter"
    if dist.get_rank() == 0:
        make_base(base, arguments.length)
    dist.barrier()

    torch.manual_seed(0)  # the same adapters on every rank
    packed = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"
    )
    model = rs.from_pretrained(
        base,
        mesh,
        quantization_config=packed,
        adapt=lambda model: get_peft_model(model, lora),
    ).train()
    optimizer = bitsandbytes.optim.AdamW8bit(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )

    dataset = counting(arguments.steps, arguments.length, model.config.vocab_size)
    losses = []
    for batch in rs.loader(dataset, mesh):  # type: ignore[arg-type]
        loss = model(**rs.shard_batch(batch, mesh)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(adapter)  # on every rank; rank 0 writes

    if dist.get_rank() == 0:
        plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=packed)
        opened = PeftModel.from_pretrained(plain, adapter).train()
        ids = dataset[-1]["input_ids"][None]
        with torch.no_grad():
            alone = opened(input_ids=ids, labels=ids).loss.item()
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; PEFT opens {adapter}: {alone:.3f} on the last sequence"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
