"""A small Llama learns to retrieve from short records, then from long ones on a ring, with scaled rotary positions.

    python examples/retrieval/train.py short
    torchrun --nproc-per-node 2 examples/retrieval/train.py extend
    python examples/retrieval/train.py control
    cd runs/retrieval
    ringspan eval lines untrained unextended extended --lengths 512,2048,8192,16384 --nproc 2 --picture lines.png

The short stage begins with four lines and takes more as four of five answers are right. The extension goes from 80
lines to 1,381, which are 16,376 tokens with their questions, and saves after each length; a run that was ended
continues there. The control has more steps, too, but at its own length and without scaling. Folders are ordinary ones
of transformers, each with its ``history.json``: ``untrained``, ``short``, ``extended``, and ``unextended``, whose
config says more positions so that longer prompts are not refused.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from muon import Muon
from record import ANSWERED, PIECES, Records, tokenizer
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs

OWN_LENGTH, FEWEST_LINES, MOST_LINES, QUESTIONS = 512, 4, 45, 16
MATRICES, OTHERS = 0.02, 3e-3
"""Learning rates of Muon and of AdamW."""
CONTROL_STEPS = 100


class Stage(NamedTuple):
    """Records of so many lines, with ``asked`` questions, for so many steps."""

    lines: int
    asked: int
    steps: int

    @property
    def length(self) -> int:
        """Tokens of a record with its questions."""
        return Records(self.lines, self.asked, 1).length

    def share(self, step: int) -> float:
        """Of the learning rates at a step, from 1: it rises over five and falls to a tenth from the middle on."""
        return min(1.0, step / 5, 0.1 + 1.8 * (1 - step / self.steps))


STAGES = (
    Stage(80, 80, 100),
    Stage(200, 200, 60),
    Stage(500, 300, 60),
    Stage(1381, 256, 50),
)


class History:
    """What a stage notes as it goes, with its seconds and CPU seconds; one that is continued counts on."""

    def __init__(
        self, mesh: DeviceMesh | None = None, folder: Path | None = None
    ) -> None:
        file = folder / "history.json" if folder else None
        self.rows: list[dict[str, float]] = (
            json.loads(file.read_text("utf-8")) if file and file.is_file() else []
        )
        self.before = (
            self.rows[-1]
            if self.rows
            else {"step": 0, "lines": 0, "seconds": 0.0, "cpu_seconds": 0.0}
        )
        self.mesh, self.began = mesh, time.perf_counter()
        self.first = mesh is None or mesh.get_local_rank("ring") == 0

    def note(self, **row: float) -> None:
        """Keep a row, and say it on rank 0. CPU seconds are those of all processes together, from their start."""
        cpu = torch.tensor(time.process_time(), dtype=torch.float64)
        if self.mesh is not None:
            dist.all_reduce(cpu, group=self.mesh.get_group("ring"))
        row["seconds"] = self.before["seconds"] + time.perf_counter() - self.began
        row["cpu_seconds"] = self.before["cpu_seconds"] + cpu.item()
        self.rows.append({name: round(value, 4) for name, value in row.items()})
        if self.first:
            print(self.rows[-1], flush=True)


def random_model() -> LlamaForCausalLM:
    """0.7M parameters, whose attention finds equal tokens before it has learnt anything.

    Queries are keys, and heads write what they read, in subspaces drawn for each layer (mimetic initialisation,
    Trockman and Kolter 2023). All embeddings share a part, which lets a head attend to a position whatever is there:
    without it a model still guessed among four lines after 900 steps. They are as large as torch draws them: small ones
    drown in what layers add.
    """
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
            torch.nn.init.normal_(
                weight, std=1.0 if "embed" in name else (3 * weight.shape[1]) ** -0.5
            )
    with torch.no_grad():
        model.model.embed_tokens.weight += torch.randn(model.config.hidden_size)
        for layer in model.model.layers:
            attention: Any = layer.self_attn
            torch.nn.init.orthogonal_(attention.q_proj.weight)
            attention.k_proj.weight.copy_(attention.q_proj.weight)
            torch.nn.init.orthogonal_(attention.v_proj.weight)
            attention.o_proj.weight.copy_(0.5 * attention.v_proj.weight.T)
    return model


class Optimizers:
    """Muon for the matrices of the layers, AdamW for the rest."""

    def __init__(self, model: Any) -> None:
        inner = {
            name
            for name, weight in model.named_parameters()
            if weight.ndim == 2 and "layers" in name
        }
        matrices = [
            weight for name, weight in model.named_parameters() if name in inner
        ]
        others = [
            weight for name, weight in model.named_parameters() if name not in inner
        ]
        self.model = model
        self.rates = (
            (Muon(matrices, lr=MATRICES), MATRICES),
            (
                torch.optim.AdamW(
                    others, lr=OTHERS, betas=(0.9, 0.95), weight_decay=0.0
                ),
                OTHERS,
            ),
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
    """Records of four lines and more, in one process, until nine of ten answers from 45 lines are right."""
    model, history = random_model(), History()
    keep_as(model, arguments, "untrained", arguments.length, history)
    optimizers, lines, solved, seen = Optimizers(model), FEWEST_LINES, 0.0, 0
    for step in range(1, arguments.steps + 1):
        records = Records(lines, QUESTIONS, 1 << 30)
        batch = max(1, arguments.tokens // records.length)
        data = default_collate([records[seen + at] for at in range(batch)])
        logits, targets = model(data["input_ids"]).logits[:, :-1], data["labels"][:, 1:]
        counted = targets != -100
        loss = torch.nn.functional.cross_entropy(logits[counted], targets[counted])
        loss.backward()
        optimizers.step(min(1.0, step / 20))
        right = (logits.argmax(-1) == targets)[counted].view(-1, ANSWERED).all(1)
        solved, seen = 0.9 * solved + 0.1 * right.float().mean().item(), seen + batch
        over = step == arguments.steps or (lines == MOST_LINES and solved > 0.9)
        if step % 25 == 0 or over:
            history.note(step=step, lines=lines, loss=loss.item(), exact=solved)
        if over:
            break
        if solved > 0.8 and lines < MOST_LINES:
            lines, solved = min(MOST_LINES, int(lines * 1.5)), 0.5
    keep_as(model, arguments, "short", OWN_LENGTH, history)


def control(arguments: argparse.Namespace) -> None:
    """The short model after more steps at its own length: what is not extended."""
    model, history = (
        LlamaForCausalLM.from_pretrained(arguments.output / "short"),
        History(),
    )
    optimizers, records = Optimizers(model), Records(40, 10, 1 << 30, seed=2)
    batch = max(1, arguments.tokens // records.length)
    for step in range(1, CONTROL_STEPS + 1):
        loss = model(
            **default_collate([records[step * batch + at] for at in range(batch)])
        ).loss
        loss.backward()
        optimizers.step(
            arguments.share * min(1.0, step / 5, 2 - 2 * (step - 1) / CONTROL_STEPS)
        )
        if step % 25 == 0:
            history.note(step=step, lines=records.lines, loss=loss.item())
    keep_as(model, arguments, "unextended", arguments.length, history)


def extend(arguments: argparse.Namespace) -> None:
    """Longer and longer records, each of them over the whole ring; what is there already is continued."""
    mesh = rs.init_mesh()
    folder = arguments.output / "extended"
    history = History(mesh, folder)
    if history.rows:
        opened = LlamaForCausalLM.from_pretrained(folder)
    else:
        opened = LlamaForCausalLM.from_pretrained(
            arguments.output / "short", config=scaled(arguments)
        )
    model: Any = rs.parallelize(opened, mesh, checkpoint="none")
    optimizers = Optimizers(model)
    for stage in STAGES:
        if history.before["lines"] < stage.lines and stage.length <= arguments.length:
            train_on(model, mesh, optimizers, stage, arguments, history)
            keep(model.save_pretrained, folder, history)
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
    model: Any,
    mesh: DeviceMesh,
    optimizers: Optimizers,
    stage: Stage,
    arguments: argparse.Namespace,
    history: History,
) -> None:
    """Steps on records of one length."""
    batch = max(1, 2 * arguments.tokens // stage.length)
    records = Records(stage.lines, stage.asked, stage.steps * batch, seed=1)
    done = int(history.rows[-1]["step"]) if history.rows else 0
    for step, each in enumerate(rs.loader(records, mesh, batch_size=batch), 1):
        loss = model(**rs.shard_batch(each, mesh)).loss
        loss.backward()
        optimizers.step(arguments.share * stage.share(step))
        if step % 5 == 0 or step == stage.steps:
            history.note(step=done + step, lines=stage.lines, loss=loss.item())


def keep_as(
    model: Any,
    arguments: argparse.Namespace,
    name: str,
    positions: int,
    history: History,
) -> None:
    """A folder of a model on one process, which says that it has so many positions."""
    model.config.max_position_embeddings = positions
    keep(model.save_pretrained, arguments.output / name, history)


def keep(save: Callable[[Path], None], folder: Path, history: History) -> None:
    """A folder that ``ringspan eval`` opens."""
    save(folder)
    if history.first:
        tokenizer().save_pretrained(folder)
        (folder / "history.json").write_text(
            json.dumps(history.rows, indent=1) + "\n", encoding="utf-8"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = {"short": short, "extend": extend, "control": control}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--output", type=Path, default=Path("runs/retrieval"))
    parser.add_argument(
        "--steps", type=int, default=1000, help="of the short stage, at most"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="of a step; twice as many in the extension",
    )
    parser.add_argument(
        "--length", type=int, default=16_384, help="the longest of the extension"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="of the learning rates, in the extension",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the same weights on any number of cores
    stages[arguments.stage](arguments)


if __name__ == "__main__":
    main()
