"""Runs the blocks of Python of a page on two ranks, with small models and sizes in place of the page's.

A page's blocks follow each other in one namespace. What a page takes for granted (a data set, a model of the reader's)
is made by the lines of ``SETUPS``. ``python -m tests.docs.running docs/jax.md FOLDER`` runs a page in one process.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from tests.docs.pages import ROOT, blocks

# What is written for the reader's machine -> what it is here. Longer than this, and the page would not be what is run.
REPLACED: Final = {
    "Qwen/Qwen3-0.6B": "{folder}/model",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "{folder}/hybrid",
    "llama-70b": "{folder}/model",
    "path/to/llama": "{folder}/model",
    "runs/demo/model": "{folder}/model",
    "runs/demo/book": "{folder}/book",
    '"result"': '"{folder}/result"',
    '"out"': '"{folder}/out"',
    '"adapter"': '"{folder}/adapter"',
    "30_000, 700, 900": "30, 7, 9",
    "ring=8": "ring=2",
    "ring=4, replicate=2": "ring=2",
    "ring=4": "ring=2",
    "ring=2, tp=2": "ring=1, tp=2",
    "devices=8": "devices=2",
    "max_new_tokens=200": "max_new_tokens=3",
    "max_new_tokens=100": "max_new_tokens=3",
    "scored=256": "scored=8",
    "SFTConfig(...)": "sft_config",
    'batch["labels"] = ...': 'batch["labels"] = batch["input_ids"]',
    'tasks=["hellaswag"]': 'tasks=["local_choice"], task_manager=known_tasks(folder + "/tasks", ["local_choice"])',
}


class Setup(NamedTuple):
    """Lines before the page's first block and before each of them."""

    once: str = ""
    each: str = ""
    alone: bool = False
    """In a process without ranks: JAX's devices are chosen once for a process."""


_LOOP: Final = """
model = build("qwen3")
mesh = rs.init_mesh(ring=2)
ids = torch.randint(2, 97, (4, 64))
dataset = [{"input_ids": row, "labels": row} for row in ids]
batch = {"input_ids": ids[:1], "labels": ids[:1]}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
_RING: Final = _LOOP + "model = rs.parallelize(model, mesh)\n"
_ATTENTION: Final = """
import torch.distributed as dist
group, rank, N, S = dist.group.WORLD, dist.get_rank(), 2, 91
q, k, v = (torch.randn(1, h, S, 16) for h in (4, 2, 2))
"""
_SFT: Final = """
import datasets, trl
from trl import SFTConfig
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
sft_config = SFTConfig(output_dir=folder + "/sft", max_steps=1, max_length=32, packing=True, report_to="none",
                       pad_token="!", eos_token="!", use_cpu=True, per_device_train_batch_size=1, save_strategy="no",
                       gradient_checkpointing=False, bf16=False)
data = held_out = datasets.Dataset.from_list([{"input_ids": list(range(2, 40))}] * 8)
"""
_BOOK: Final = """
book = "a book of a few words " * 9
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
book_ids, question_ids = (tokenizer(text, return_tensors="pt").input_ids for text in (book, "words "))
"""

SETUPS: Final = {
    "docs/how-to/gpus.md": Setup(once=_LOOP),
    "docs/how-to/documents.md": Setup(
        once=_RING
        + _ATTENTION
        + """
documents = [torch.randint(2, 97, (n,)) for n in (700, 1300, 48)]
q, k, v = (torch.randn(1, h, 1024, 16) for h in (4, 2, 2))
""",
        each="if 'loss' in dir() and 'layout=\"balanced\"' in text: model = build('qwen3')",
    ),
    "docs/how-to/memory.md": Setup(once=_LOOP, each="sizes = dict(feedforward_chunk_tokens=16)"),
    "docs/how-to/full-length.md": Setup(
        once=_BOOK + "model = rs.parallelize(build('qwen3', vocab_size=300), rs.init_mesh(ring=2)).eval()\n"
    ),
    "docs/how-to/from-ring-flash-attention.md": Setup(once=_ATTENTION),
    "docs/how-to/from-accelerate.md": Setup(once=_LOOP + "loader = torch.utils.data.DataLoader(dataset)\n"),
    "docs/how-to/from-torchtitan.md": Setup(once=_LOOP),
    "docs/how-to/from-deepspeed.md": Setup(once=_LOOP),
    "docs/adapters.md": Setup(once=_LOOP + "from peft import LoraConfig, get_peft_model\n"),
    "docs/evaluation.md": Setup(
        once=_BOOK
        + """
import lm_eval
tokenizer.eos_token = "!"
from ringspan.evaluate.harness.run import known_tasks
model, mesh = build("llama", vocab_size=300), rs.init_mesh(ring=2)
"""
    ),
    "docs/generation.md": Setup(once=_BOOK),
    "docs/hybrids.md": Setup(once=_LOOP),
    "docs/jax.md": Setup(once="ids = torch.randint(2, 97, (2, 64)).numpy()", alone=True),
    "docs/layouts.md": Setup(
        once=_LOOP + 'batch["position_ids"] = torch.cat([torch.arange(40), torch.arange(24)])[None]\n'
    ),
    "docs/lightning.md": Setup(
        once=_LOOP
        + """
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader
import functools
Trainer = functools.partial(Trainer, accelerator="cpu", logger=False, enable_progress_bar=False,
                            enable_checkpointing=False)
"""
    ),
    "docs/loop.md": Setup(
        once=_RING
        + """
import torch.distributed as dist
from transformers import AutoModel, LlamaConfig, PreTrainedModel
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=97)
observations, actions, mask = torch.randn(2, 30, 17), torch.randn(2, 30, 6), torch.ones(2, 30)
"""
    ),
    "docs/masks.md": Setup(
        once=_ATTENTION + "S = 8192\nq, k, v = (torch.randn(1, h, S // N, 16) for h in (4, 2, 2))\n"
    ),
    "docs/multimodal.md": Setup(
        once="""
from tests.torch.multimodal import models as multimodal
mesh = rs.init_mesh(ring=2)
images, texts = None, None
made = multimodal.batch_of("qwen2_5_vl", [[3, "i", 8]], dtype=torch.float32)
class AutoModelForImageTextToText:
    from_pretrained = staticmethod(lambda name: multimodal.build("qwen2_5_vl", dtype=torch.float32))
def processor(**arguments): return dict(made)
"""
    ),
    "docs/scoring.md": Setup(
        once=_LOOP
        + """
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
pairs = [{"input_ids": ids[:2], "labels": ids[:2]}]
"""
    ),
    "docs/shared-prefixes.md": Setup(
        once=_RING + "ids = ids[:1, :46]\nrows = [[5] * 70 + [2, 3], [5] * 70 + [7]]\n",
        each="labels = ids if 'segment_lengths' in text else rows",
    ),
    "docs/tensor-parallel.md": Setup(once=_LOOP + "ids = ids[:2]\n"),
    "docs/trainers.md": Setup(
        once=_SFT
        + _LOOP
        + """
loader = torch.utils.data.DataLoader(dataset)
""",
        each="""
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
""",
    ),
    "docs/understand/blocks.md": Setup(),
    "docs/understand/exactness.md": Setup(),
    "docs/weights.md": Setup(once=_LOOP + "from peft import LoraConfig, get_peft_model\n"),
}

# Blocks that other tests run, since they need a package that `make setup` does not install; by a line of theirs.
ELSEWHERE: Final = {
    "TorchAoConfig(Int8WeightOnlyConfig())": "tests/torch/model/test_packed.py",
    "BitsAndBytesConfig(": "tests/torch/model/test_four_bits.py",
    "RingConfig(shared_prefix=True)": "tests/hf/test_shared.py",
    "deepseek-ai/DeepSeek-V3.2": "tests/torch/recurrence/test_models.py",
}


def python_blocks(page: str) -> list[tuple[str, str]]:
    """Place and text of the blocks of a page that are run here."""
    return [
        (block.place, block.text)
        for block in blocks(ROOT / page)
        if block.language == "python" and not any(line in block.text for line in ELSEWHERE)
    ]


def run_page(_mesh: Any, page: str, folder: str) -> list[str]:
    """Run all blocks of a page on this rank; the places of those that were run."""
    import transformers
    from torch import nn

    import ringspan as rs
    from tests.torch.models import build

    setup = SETUPS[page]
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "rs": rs, "build": build, "folder": folder,
        **{name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "AutoTokenizer")},
    }  # fmt: skip
    before, environment = os.getcwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)  # a block that writes somewhere else than it says leaves nothing behind
        try:
            exec(setup.once, names)
            ran: list[str] = []
            for place, text in python_blocks(page):
                for written, here in REPLACED.items():
                    text = text.replace(written, here.replace("{folder}", folder))
                names["text"] = text
                exec(setup.each, names)
                exec(compile(text, place, "exec"), names)
                ran.append(place)
        finally:
            os.chdir(before)
            os.environ |= environment  # Lightning takes MASTER_ADDR out when it has trained
    return ran


def save_models(folder: Path) -> None:
    """What the pages' models are here: folders with a tiny model and a tokenizer; and tasks for lm-eval."""
    from tests.cli.commands.test_generate import save_tokenizer
    from tests.evaluate.harness.data import write
    from tests.torch.models import build

    for name, kind in (("model", "llama"), ("hybrid", "qwen3_next")):
        build(kind, vocab_size=300).save_pretrained(folder / name)
        save_tokenizer(folder / name)
    (folder / "tasks").mkdir()
    write(folder / "tasks")


if __name__ == "__main__":
    print("\n".join(run_page(None, *sys.argv[1:])))
