"""What the model reads: the records of ``ringspan eval lines``, in ten tokens a line.

line brave-otter: REGISTER_CONTENT is <51394>
[line ][brave][-otter][: REGISTER_CONTENT is <][5][1][3][9][4][>\\n]
"""

import re
from typing import Final

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from ringspan.evaluate.tasks import ADJECTIVES, NOUNS, TEXTS

BEFORE, AFTER, ASKED = re.split(r"\{record\}|line \{name\}", TEXTS["lines"]["text"])

CUE: Final = ": REGISTER_CONTENT is <"
FIXED: Final = ("[unknown]", BEFORE, AFTER, f"{ASKED}\n", "line ", CUE, ">\n")
PIECES: Final = (*FIXED, *"0123456789", *ADJECTIVES, *(f"-{noun}" for noun in NOUNS))
BEGIN, ASK, ANSWER, LINE, IS, END = (FIXED.index(piece) for piece in FIXED[1:])
DIGIT: Final = len(FIXED)
ADJECTIVE: Final = DIGIT + 10
NOUN: Final = ADJECTIVE + len(ADJECTIVES)
PER_LINE: Final = 10
ANSWERED: Final = 6
"""Tokens of an answer, at the end of its line: five digits and what ends them."""
AROUND: Final = 6
"""Tokens of the beginning and of the question."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, digit and fixed phrase; what is decoded is what was read."""
    made = Tokenizer(
        models.WordLevel(
            {piece: at for at, piece in enumerate(PIECES)}, unk_token=FIXED[0]
        )
    )
    phrases = "|".join(_escaped(piece) for piece in FIXED[1:])
    made.pre_tokenizer = pre_tokenizers.Split(
        Regex(f"{phrases}|-[a-z]+|[a-z]+|."), "isolated"
    )
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=FIXED[0],
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )


def _escaped(piece: str) -> str:
    return "".join(
        f"\\{char}" if char in ".?<>()[]{}|*+^$" else "\\n" if char == "\n" else char
        for char in piece
    )


class Records(Dataset[dict[str, torch.Tensor]]):
    """Records of ``lines`` lines with ``asked`` questions; example ``i`` is the same on every process.

    A line may be asked for again: were each asked for once, answers could be had from what was not asked for yet.
    Labels are those of the answers alone, with what ends them.
    """

    def __init__(self, lines: int, asked: int, examples: int, *, seed: int = 0) -> None:
        self.lines, self.asked, self.examples, self.seed = lines, asked, examples, seed

    def __len__(self) -> int:
        return self.examples

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return AROUND + PER_LINE * (self.lines + self.asked)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng((self.seed, self.lines, index))
        pairs = random.choice(len(ADJECTIVES) * len(NOUNS), self.lines, replace=False)
        numbers = random.integers(10_000, 100_000, self.lines)
        lines = np.empty((self.lines, PER_LINE), dtype=np.int64)
        lines[:, [0, 3, 9]] = LINE, IS, END
        lines[:, 1], lines[:, 2] = (
            ADJECTIVE + pairs // len(NOUNS),
            NOUN + pairs % len(NOUNS),
        )
        lines[:, 4:9] = DIGIT + numbers[:, None] // 10 ** np.arange(4, -1, -1) % 10
        chosen = lines[random.integers(0, self.lines, self.asked)]
        question = [ASK, *chosen[0, :3], ANSWER]
        ids = np.concatenate([[BEGIN], lines.ravel(), question, chosen.ravel()])
        labels = np.full_like(ids, -100)
        answers = labels[-PER_LINE * self.asked :].reshape(-1, PER_LINE)
        answers[:, -ANSWERED:] = chosen[:, -ANSWERED:]
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
