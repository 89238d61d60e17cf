"""Folders with a tiny model and a tokenizer of bytes, and what one process of plain transformers answers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.evaluate.prompts import Prompts
from ringspan.evaluate.settings import EvalSettings
from tests.cli.commands.test_generate import save_model, save_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"


def save(folder: Path, *, template: str | None = None, **changes: Any) -> Path:
    """A model that says something else for each text."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    save_model(folder, **{"max_position_embeddings": 4096, **changes})
    if template:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return folder


def plain_tokens(settings: EvalSettings) -> list[list[int]]:
    """The new tokens of each item by a loop of transformers' own."""
    tokenizer = AutoTokenizer.from_pretrained(settings.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.folder).eval()
    prompts, found = Prompts(settings, tokenizer), []
    for length, depth in settings.cells:
        for index in range(settings.items):
            asked = prompts.question(length, depth, index)
            ids = torch.tensor([asked.ids])
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.max_new_tokens, do_sample=False
            )
            found.append(whole[0, len(asked.ids) :].tolist())
    return found
