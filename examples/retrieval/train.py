"""A small Llama learns to retrieve from short records, then from long ones on a ring, with scaled rotary positions.

    python examples/retrieval/train.py short
    torchrun --nproc-per-node 2 examples/retrieval/train.py extend
    python examples/retrieval/train.py control
    cd runs/retrieval
    ringspan eval lines untrained unextended extended --lengths 512,1024,2048,4096 --nproc 2 --picture lines.png

The short stage begins with four lines and takes more as it answers nine of ten. The extension goes from 80 lines to
400, and saves after each stage; a run that was ended continues there. The control has more steps, too, but at its own
length and without scaling. Folders are ordinary ones of transformers, each with its ``history.json``: ``untrained``,
``short``, ``extended``, and ``unextended``, whose config says more positions so that longer prompts are not refused.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import ANSWERED, PIECES, Records, tokenizer
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs

OWN_LENGTH, MOST_LINES = 512, 45
MATRICES, OTHERS = 0.02, 3e-3
"""Learning rates of Muon and of AdamW."""
STAGES = ((80, 100), (160, 40), (320, 30), (400, 50))
"""Lines and steps of the extension; rates fall to a tenth from step 103 to 196."""

CONTROL_STEPS = 100

History = list[dict[str, float]]


def random_model() -> LlamaForCausalLM:
    """0.7M parameters. Embeddings are drawn as large as torch draws them: small ones drown in what layers add."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(PIECES),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=OWN_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else (3 * weight.shape[1]) ** -0.5)
    return model


class Optimizers:
    """Muon for the matrices of the layers, AdamW for the rest."""

    def __init__(self, model: Any) -> None:
        inner = {name for name, weight in model.named_parameters() if weight.ndim == 2 and "layers" in name}
        matrices = [weight for name, weight in model.named_parameters() if name in inner]
        others = [weight for name, weight in model.named_parameters() if name not in inner]
        self.model = model
        self.rates = (
            (torch.optim.Muon(matrices, lr=MATRICES, weight_decay=0.0, momentum=0.95), MATRICES),
            (torch.optim.AdamW(others, lr=OTHERS, betas=(0.9, 0.95), weight_decay=0.0), OTHERS),
        )

    def step(self, share: float) -> None:
        """One step at a share of the learning rates."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self.rates:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()


def short(arguments: argparse.Namespace) -> None:
    """Records of four lines and more, in one process; the loss is that of the digits, and of copying."""
    model = random_model()
    keep_as(model, arguments, "untrained", arguments.length, [])
    optimizers, history = Optimizers(model), []
    lines, solved, seen, began = 4, 0.0, 0, time.perf_counter()
    for step in range(1, arguments.steps + 1):
        records = Records(lines, max(4, min(lines, 16)), 1 << 30, copied=0.25, ends=False)
        batch = max(1, arguments.tokens // records.length)
        data = default_collate([records[seen + at] for at in range(batch)])
        logits, targets = model(data["input_ids"]).logits[:, :-1], data["labels"][:, 1:]
        counted = targets != -100
        loss = torch.nn.functional.cross_entropy(logits[counted], targets[counted])
        loss.backward()
        optimizers.step(min(1.0, step / 20))
        right = answered(logits.argmax(-1), targets, counted, records.asked)
        solved = solved if right is None else 0.9 * solved + 0.1 * right
        seen += batch
        if step % 25 == 0 or step == arguments.steps:
            note(history, step=step, lines=lines, loss=loss.item(), exact=solved, seconds=time.perf_counter() - began)
        if solved > 0.9 and lines < MOST_LINES:
            lines, solved = min(MOST_LINES, max(lines + 1, int(lines * 1.3))), 0.5
    keep_as(model, arguments, "short", OWN_LENGTH, history)


def control(arguments: argparse.Namespace) -> None:
    """The short model after more steps at its own length, where it learns what ends an answer: what is not extended."""
    model, history = LlamaForCausalLM.from_pretrained(arguments.output / "short"), []
    optimizers, steps, began = Optimizers(model), CONTROL_STEPS, time.perf_counter()
    records = Records(40, 10, 1 << 30, seed=2)
    batch = max(1, arguments.tokens // records.length)
    for step in range(steps):
        data = default_collate([records[step * batch + at] for at in range(batch)])
        loss = model(**data).loss
        loss.backward()
        optimizers.step(arguments.share * min(1.0, (step + 1) / 5, 2 - 2 * step / steps))
        if step % 25 == 24:
            note(history, step=step + 1, lines=40, loss=loss.item(), seconds=time.perf_counter() - began)
    keep_as(model, arguments, "unextended", arguments.length, history)


def answered(said: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor, asked: int) -> float | None:
    """The share of questions whose five digits are right; None in a batch of copies alone."""
    digits = ANSWERED - 1
    rows = counted.sum(1) == digits * asked
    if not rows.any():
        return None
    hits = (said == targets)[rows][counted[rows]]
    return hits.view(-1, digits).all(1).float().mean().item()


def extend(arguments: argparse.Namespace) -> None:
    """Longer and longer records, each of them over the whole ring; what is there already is continued."""
    mesh = rs.init_mesh()
    folder, history = arguments.output / "extended", []
    stages = [stage for stage in STAGES if Records(stage[0], 1, 1).length <= arguments.length]
    if (folder / "history.json").is_file():
        history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
        opened = LlamaForCausalLM.from_pretrained(folder)
    else:
        opened = LlamaForCausalLM.from_pretrained(arguments.output / "short", config=scaled(arguments))
    model: Any = rs.parallelize(opened, mesh, checkpoint="none")
    done, at = (history[-1]["step"] if history else 0), 0
    for lines, count in stages:
        if at + count > done:
            train_on(model, mesh, lines, range(at, at + count), arguments, history)
            keep(model.save_pretrained, folder, history)
        at += count
    dist.destroy_process_group()


def scaled(arguments: argparse.Namespace) -> LlamaConfig:
    """The short model's config with YaRN's frequencies for the longest records."""
    own = LlamaConfig.from_pretrained(arguments.output / "short")
    own.max_position_embeddings = arguments.length
    own.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": own.rope_parameters["rope_theta"],
        "factor": arguments.length / OWN_LENGTH,
        "original_max_position_embeddings": OWN_LENGTH,
    }
    return own


def train_on(
    model: Any, mesh: DeviceMesh, lines: int, at: range, arguments: argparse.Namespace, history: History
) -> None:
    """The steps ``at``, on records of so many lines; the loss is that of the answers with their ends."""
    asked = min(lines, 128)
    batch = max(1, 2 * arguments.tokens // Records(lines, asked, 1).length)
    records = Records(lines, asked, len(at) * batch, seed=1)
    optimizers, began = Optimizers(model), time.perf_counter()
    for step, each in zip(at, rs.loader(records, mesh, batch_size=batch), strict=True):
        loss = model(**rs.shard_batch(each, mesh)).loss
        loss.backward()
        optimizers.step(arguments.share * min((step - at[0] + 1) / 5, max(0.1, 2 - step / 103), 1.0))
        if step % 5 == 4 or step == at[-1]:
            note(history, step=step + 1, lines=lines, loss=loss.item(), seconds=time.perf_counter() - began)


def note(history: History, **row: float) -> None:
    """Keep a row, and say it on rank 0."""
    history.append({name: round(value, 4) for name, value in row.items()})
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(history[-1], flush=True)


def keep_as(model: Any, arguments: argparse.Namespace, name: str, positions: int, history: History) -> None:
    """A folder of a model on one process, which says that it has so many positions."""
    model.config.max_position_embeddings = positions
    keep(model.save_pretrained, arguments.output / name, history)


def keep(save: Callable[[Path], None], folder: Path, history: History) -> None:
    """A folder that ``ringspan eval`` opens."""
    save(folder)
    if not dist.is_initialized() or dist.get_rank() == 0:
        tokenizer().save_pretrained(folder)
        (folder / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = {"short": short, "extend": extend, "control": control}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--output", type=Path, default=Path("runs/retrieval"))
    parser.add_argument("--steps", type=int, default=1302, help="of the short stage")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step; twice as many in the extension")
    parser.add_argument("--length", type=int, default=16_384, help="the longest of the extension")
    parser.add_argument("--share", type=float, default=0.5, help="of the learning rates, in the extension")
    arguments = parser.parse_args()
    stages[arguments.stage](arguments)


if __name__ == "__main__":
    main()
