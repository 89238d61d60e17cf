"""Runs the blocks of Python of a page on two ranks, with small models and sizes in place of the page's.

A page's blocks follow each other in one namespace. What a page takes for granted (a data set, a model of the reader's)
is made by lines of ``running.toml``. ``python -m tests.docs.running docs/jax.md FOLDER`` runs a page in one process.
"""

import os
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from tests.docs.pages import ROOT, blocks

_TABLES: Final = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
REPLACED: Final[dict[str, str]] = _TABLES["replaced"]
ELSEWHERE: Final[dict[str, str]] = _TABLES["elsewhere"]


class Setup(NamedTuple):
    """What ``running.toml`` has for a page."""

    parts: Sequence[str] = ()
    once: str = ""
    each: str = ""
    alone: bool = False

    @property
    def lines(self) -> str:
        """Before the page's first block."""
        return "\n".join([*(_TABLES["parts"][part] for part in self.parts), self.once])


SETUPS: Final = {page: Setup(**table) for page, table in _TABLES["pages"].items()}


def python_blocks(page: str) -> list[tuple[str, str]]:
    """Place and text of the blocks of a page that are run here."""
    return [
        (block.place, block.text)
        for block in blocks(ROOT / page)
        if block.language == "python"
        and not any(line in block.text for line in ELSEWHERE)
    ]


def run_page(_mesh: Any, page: str, folder: str) -> list[str]:
    """Run all blocks of a page on this rank; the places of those that were run."""
    import transformers
    from torch import nn

    import ringspan as rs
    from tests.torch.models import build

    setup = SETUPS[page]
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "rs": rs,
        "build": build,
        "folder": folder,
        **{
            name: getattr(transformers, name)
            for name in ("AutoModelForCausalLM", "AutoTokenizer")
        },
    }
    before, environment = os.getcwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as empty:
        # a block that writes somewhere else than it says leaves nothing behind
        os.chdir(empty)
        try:
            exec(setup.lines, names)
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
            # Lightning takes MASTER_ADDR out when it has trained
            os.environ |= environment
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
