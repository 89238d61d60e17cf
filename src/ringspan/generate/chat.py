"""A conversation in a tokenizer's terms: the tokens to read after the cache's."""

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase as Tokenizer

from ringspan.core.errors import ConfigError
from ringspan.generate.folder import check_ids
from ringspan.generate.session import PATIENCE_SECONDS, Session

WAIT_SECONDS: Final = 2.0
"""Seconds that ranks wait for a line before they confirm to each other; process groups have time-outs."""


@dataclass
class Conversation:
    """All tokens so far, a ``book``'s first, and the same as messages of a chat template, if it exists."""

    tokenizer: Tokenizer
    book: list[int] = field(default_factory=list)
    ids: list[int] = field(init=False)
    messages: list[dict[str, str]] = field(default_factory=list)
    _text: str = ""

    def __post_init__(self) -> None:
        self.ids = list(self.book)

    def ask(self, line: str, check: Callable[[list[int]], None] = lambda ids: None) -> bool:
        """Add a user's line; return False if templates drop old answers, so that the cache is void."""
        if not self.tokenizer.chat_template:
            start = "\n" if self.ids else ""
            ids = self.ids + self._encode(f"{start}{line}\n", add_special_tokens=not self.ids)
            check(ids)
            self.ids = ids
            return True
        messages = [*self.messages, {"role": "user", "content": line}]
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        goes_on = text.startswith(self._text)
        new = self._encode(text[len(self._text) :] if goes_on else text, add_special_tokens=False)
        ids = [*(self.ids if goes_on else self.book), *new]
        check(ids)
        self.ids, self.messages, self._text = ids, messages, text
        return goes_on

    def answered(self, token_ids: list[int]) -> None:
        """Add the model's answer. An end of text belongs to a template, and otherwise would end all that follows."""
        ended = bool(token_ids) and token_ids[-1] == self.tokenizer.eos_token_id
        if ended and not self.tokenizer.chat_template:
            token_ids = token_ids[:-1]
        self.ids = [*self.ids, *token_ids]
        self._text += str(self.tokenizer.decode(token_ids))
        said = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": said})

    def _encode(self, text: str, **options: Any) -> list[int]:
        return list(self.tokenizer(text, **options).input_ids)


class Lines:
    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._read, self._is_over = descriptor, b"", False

    def next(self, seconds: float = WAIT_SECONDS) -> tuple[str | None, bool]:
        """Return the next line that is not blank, or None so far; and True at the end."""
        while True:
            if b"\n" in self._read or (self._is_over and self._read):
                line, _, self._read = self._read.partition(b"\n")
                if line.strip():
                    return line.decode("utf-8-sig", errors="replace").strip(), False
                continue
            if self._is_over:
                return None, True
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None, False
            more = os.read(self._descriptor, 1 << 16)
            self._read, self._is_over = self._read + more, not more


def converse(model: Session, first: str | None, descriptor: int | None) -> None:
    """Answer lines until they end, keeping the cache over all turns; ``first`` is a known first line.

    Rank 0 reads ``descriptor``; every rank calls this, and errors are all ranks'. The settings name a cache to begin
    after and one to save at the end. A line without room in the model is refused, and the conversation stays.
    """
    book, cache = model.opened()
    conversation = Conversation(model.tokenizer, book)
    lines = Lines(descriptor) if descriptor is not None else None
    line, is_option = first, first is not None
    if line is None:
        model.observer.asks()
    while True:
        while line is None:
            found: list[Any] = list(lines.next()) if lines is not None else [None, None]
            model.watchdog.be(0, "waiting for a line", PATIENCE_SECONDS)
            dist.broadcast_object_list(found)
            line, is_over = found
            if is_over:
                if conversation.ids:
                    model.keep(cache)
                return
        try:
            goes_on = conversation.ask(line, lambda ids: check_ids(ids, model.settings, model.model.config))
        except ConfigError as error:
            if is_option:  # of the command, which ends with it as with any other
                raise
            model.observer.refused(str(error))
        else:
            if not goes_on or model.num_beams > 1:
                cache = model.new_cache()
            conversation.answered(model.answer(conversation.ids, cache).token_ids)
            model.observer.wrote("\n")
        model.observer.asks()
        line, is_option = None, False
