"""A Lightning module on a ring: two lines of a module, and one of the trainer.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py
    torchrun --nproc-per-node 4 examples/lightning_trainer.py --replicate 2

It makes its own model and data.
"""

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.lightning import RingStrategy

VOCABULARY = 64


def counting(examples: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count from anywhere, and begin anew behind the last number."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCABULARY, (examples, 1), generator=draw)
    rows = (starts + torch.arange(length)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


class Counter(LightningModule):
    """A small Llama that learns to count."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.model, self.losses = length, None, []

    def configure_model(self) -> None:
        """On the ring, once there is one."""
        if self.model is None:
            torch.manual_seed(0)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=self.length,
                )
            )
            self.model = rs.parallelize(model, self.device_mesh)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of the whole batch, on every rank."""
        loss = self.model(**rs.shard_batch(batch, self.device_mesh)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW on the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


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
        "--output",
        default="runs/lightning",
        help="where the checkpoint and the model go",
    )
    arguments = parser.parse_args()

    module = Counter(arguments.length)
    trainer = Trainer(
        strategy=RingStrategy(replicate=arguments.replicate),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(counting(arguments.steps * arguments.replicate, arguments.length)),
    )
    # shards, which load on any mesh
    trainer.save_checkpoint(f"{arguments.output}/checkpoint")
    # what from_pretrained opens
    module.model.save_pretrained(f"{arguments.output}/model")
    if trainer.is_global_zero:
        print(
            f"loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f}; the model is in {arguments.output}/model"
        )


if __name__ == "__main__":
    main()
