"""What the model reads: the records of ``ringspan eval lines``, in ten tokens a line, and sequences to copy.

line brave-otter: REGISTER_CONTENT is <51394>
[line ][brave][-otter][: REGISTER_CONTENT is <][5][1][3][9][4][>\\n]
"""

from typing import Any, Final

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from ringspan.evaluate.tasks.lines import AFTER, ASKED, BEFORE
from ringspan.evaluate.words import ADJECTIVES, NOUNS

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
    made = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(PIECES)}, unk_token=FIXED[0]))
    phrases = "|".join(_escaped(piece) for piece in FIXED[1:])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(f"{phrases}|-[a-z]+|[a-z]+|."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=FIXED[0], clean_up_tokenization_spaces=False, model_max_length=1 << 20
    )


def _escaped(piece: str) -> str:
    return "".join(f"\\{char}" if char in ".?<>()[]{}|*+^$" else "\\n" if char == "\n" else char for char in piece)


class Records(Dataset[dict[str, torch.Tensor]]):
    """Records of ``lines`` lines, of which ``asked`` are asked for; example ``i`` is the same on every process.

    A share ``copied`` of them are random words that occur twice instead: copying is the first step of retrieving.
    Labels are those of the answers alone, with what ends them unless ``ends`` is false.
    """

    def __init__(
        self, lines: int, asked: int, examples: int, *, seed: int = 0, copied: float = 0.0, ends: bool = True
    ) -> None:
        self.lines, self.asked, self.examples, self.seed, self.copied = lines, asked, examples, seed, copied
        self.labelled = slice(-ANSWERED, None if ends else -1)

    def __len__(self) -> int:
        return self.examples

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return AROUND + PER_LINE * (self.lines + self.asked)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = np.random.default_rng((self.seed, self.lines, index))
        ids, labels = (self._copy if random.random() < self.copied else self._record)(random)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    def _record(self, random: Any) -> tuple[np.ndarray, np.ndarray]:
        pairs = random.choice(len(ADJECTIVES) * len(NOUNS), self.lines, replace=False, shuffle=False)
        pairs = random.permutation(pairs)
        numbers = random.integers(10_000, 100_000, self.lines)
        lines = np.empty((self.lines, PER_LINE), dtype=np.int64)
        lines[:, [0, 3, 9]] = LINE, IS, END
        lines[:, 1], lines[:, 2] = ADJECTIVE + pairs // len(NOUNS), NOUN + pairs % len(NOUNS)
        lines[:, 4:9] = DIGIT + numbers[:, None] // 10 ** np.arange(4, -1, -1) % 10
        chosen = lines[random.choice(self.lines, self.asked, replace=self.asked > self.lines)]
        question = [ASK, *chosen[0, :3], ANSWER]
        ids = np.concatenate([[BEGIN], lines.ravel(), question, chosen.ravel()])
        labels = np.full_like(ids, -100)
        answers = labels[-PER_LINE * self.asked :].reshape(-1, PER_LINE)
        answers[:, self.labelled] = chosen[:, self.labelled]
        return ids, labels

    def _copy(self, random: Any) -> tuple[np.ndarray, np.ndarray]:
        half = self.length // 2
        ids = np.tile(random.integers(DIGIT, len(PIECES), half), 3)[: self.length]
        labels = ids.copy()
        labels[: half + 1] = -100
        return ids, labels
