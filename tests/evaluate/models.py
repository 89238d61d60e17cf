"""Folders with a tiny model and a tokenizer of bytes, and what one process of plain transformers answers."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ringspan.evaluate.prompts import Prompts
from ringspan.evaluate.settings import EvalSettings
from ringspan.evaluate.tasks import ADJECTIVES, NOUNS
from tests.cli.commands.test_generate import save_model, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
)


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


def save_of_words(folder: Path, **changes: Any) -> Path:
    """The same with a token a word or number, so that long lists of words are short."""
    pieces = [
        "?",
        "-",
        ".",
        *dict.fromkeys([*ADJECTIVES, *NOUNS]),
        *map(str, range(1, 400)),
    ]
    tokenizer: Any = Tokenizer(
        models.WordLevel({piece: at for at, piece in enumerate(pieces)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    save(folder, vocab_size=len(pieces), **changes)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(
        folder
    )
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
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked.max_new_tokens,
                do_sample=False,
            )
            found.append(whole[0, len(asked.ids) :].tolist())
    return found
