"""Real text, and the longest prompts of a length that fit with their answers."""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Final

from transformers import PreTrainedTokenizerBase

from ringspan.core.errors import ConfigError
from ringspan.evaluate.settings import EvalSettings
from ringspan.evaluate.tasks import TASKS, Material, Prompt, Task

_SENTENCE_END: Final = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")
_STEP: Final = 32
_MORE_TOKENS: Final = 8
_LEAST_PER_UNIT: Final = 0.01


@dataclass(frozen=True)
class Question:
    ids: list[int]
    max_new_tokens: int
    answers: tuple[str, ...]


class Prompts:
    """A task's questions for a tokenizer, the same for the same settings."""

    def __init__(
        self, settings: EvalSettings, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self.task: Task = TASKS[settings.task]
        text = sentences(prose(settings.text)) if self.task.needs_text else ()
        self._material = Material(
            text, settings.needles or self.task.needles or 1, settings.distractors
        )

    def question(self, length: int, depth: float | None, index: int) -> Question:
        """Make the longest prompt that fits, to about a unit, with its own random numbers; ConfigError if none."""

        def at(size: int) -> tuple[Question, int]:
            seed = f"{self._settings.seed} {self.task.name} {length} {depth} {index}"
            random = Random(seed)  # noqa: S311
            prompt = self.task.build(
                random, size, 0.5 if depth is None else depth, self._material
            )
            made = self._tokens(prompt)
            return made, len(made.ids) + made.max_new_tokens

        smallest = self.task.smallest
        best, shortest = at(smallest)
        if shortest > length:
            raise ConfigError(
                f"--lengths {length}: the shortest prompt of {self.task.name} takes {shortest:,} tokens with its "
                "answer; give a greater length"
            )
        # Tokens are nearly linear in units: extrapolate from two sizes, then interpolate between sizes on both sides.
        low, low_tokens, high = smallest, shortest, smallest + _STEP
        made, high_tokens = at(high)
        while high_tokens <= length:
            per_unit = max(
                (high_tokens - shortest) / (high - smallest), _LEAST_PER_UNIT
            )
            best, low, low_tokens = made, high, high_tokens
            high = low + max(1, int((length - low_tokens) / per_unit) + 1)
            made, high_tokens = at(high)
        while high - low > 1 and length - low_tokens >= (
            per_unit := (high_tokens - low_tokens) / (high - low)
        ):
            guess = min(low + max(1, int((length - low_tokens) / per_unit)), high - 1)
            made, tokens = at(guess)
            if tokens <= length:
                best, low, low_tokens = made, guess, tokens
            else:
                high, high_tokens = guess, tokens
        return best

    def _tokens(self, prompt: Prompt) -> Question:
        ids = with_template(
            self._tokenizer, prompt.text, prompt.cue, plain=self._settings.plain
        )
        answer = self._tokenizer(
            " ".join(prompt.answers), add_special_tokens=False
        ).input_ids
        # Leave room for words between the answers.
        return Question(ids, 2 * len(answer) + _MORE_TOKENS, prompt.answers)


def with_template(
    tokenizer: PreTrainedTokenizerBase, text: str, cue: str, *, plain: bool
) -> list[int]:
    """Tokenize the user's text and the answer's cue, by the chat template if it exists."""
    if plain or not tokenizer.chat_template:
        return list(tokenizer(text + cue).input_ids)
    messages = [{"role": "user", "content": text}]
    said = str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    )
    return list(tokenizer(said + cue.lstrip("\n"), add_special_tokens=False).input_ids)


def read_text(path: str | Path) -> str:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--text {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text {path}: is not UTF-8 text (byte {error.start}); convert it"
        ) from error
    if not text.strip():
        raise ConfigError(f"--text {path}: has no text; give a file with some")
    return text


def prose(paths: Sequence[str] = ()) -> str:
    """Read the named files, or the language reference of ``help()`` (465,000 characters in Python 3.11)."""
    if paths:
        return "\n\n".join(read_text(path) for path in paths)
    topics = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def sentences(text: str) -> tuple[str, ...]:
    """Split a text into sentences, one per line; parts without a word are left out."""
    parts = (" ".join(part.split()) for part in _SENTENCE_END.split(text))
    found = tuple(part for part in parts if re.search(r"[A-Za-z]{2}", part))
    if not found:
        raise ConfigError("the text has no sentences; give another --text")
    return found


def long_documents(paths: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return (name, text) of the named files, or of the language reference and standard library, longest first."""
    documents = [(str(path), read_text(path)) for path in paths]
    if not documents:
        folder = Path(sysconfig.get_path("stdlib"))
        modules = [
            (path.name, path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("*.py"))
        ]
        documents = [("language reference", prose()), *modules]
    return sorted(documents, key=lambda document: (-len(document[1]), document[0]))
