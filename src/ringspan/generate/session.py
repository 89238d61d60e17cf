"""A model on the ring that answers prompts; every rank runs it."""

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.generation.streamers import TextStreamer

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.generate.folder import check_ids, load_model
from ringspan.generate.settings import GenerateSettings
from ringspan.torch.generate.cache.cache import RingCache
from ringspan.torch.generate.cache.saved import refuse_unsaved
from ringspan.torch.model.consistency.watchdog import Limits, Watchdog
from ringspan.torch.model.layers.view import decoder_on_ring
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.runtime.mesh import init_mesh

PATIENCE_SECONDS: Final = 600.0  # for ranks that report but exchange nothing


@dataclass
class Observer:
    doing: Callable[[str], None] = lambda what: None
    read: Callable[[int, int], None] = lambda tokens, total: None
    wrote: Callable[[str], None] = lambda text: None
    asks: Callable[[], None] = lambda: None
    refused: Callable[[str], None] = lambda why: None


@dataclass(frozen=True)
class Answer:
    """The new tokens, without the prompt, and their cost, as ``ringspan generate --json`` prints it."""

    text: str
    token_ids: list[int]
    prefill_seconds: float
    """Seconds from the call to the first new token."""
    seconds_per_token: float | None
    """Seconds per token after the first; None if there is no other."""
    cache_bytes_per_rank: int
    """Largest share of any rank."""


@dataclass
class Session:
    """The model on the ring, and its watchdog; every rank makes the same calls."""

    settings: GenerateSettings
    model: Any
    tokenizer: Tokenizer
    watchdog: Watchdog
    observer: Observer = field(default_factory=Observer)

    @property
    def num_beams(self) -> int:
        """Beams of the model's generation_config; a cache of several beams cannot be continued."""
        return self.model.generation_config.num_beams or 1

    def new_cache(self) -> RingCache:
        """Return an empty cache, or the one that the settings name. Errors are raised on all ranks."""
        dtype = (
            None if self.settings.cache_dtype == "auto" else self.settings.cache_dtype
        )
        if self.settings.load_cache is None:
            return self.model.new_cache(dtype)
        self.observer.doing("loading the cache")
        self.watchdog.be(0, "loading the cache", PATIENCE_SECONDS)
        return self.model.load_cache(self.settings.load_cache, dtype)

    def answer_once(self, ids: Sequence[int]) -> Answer:
        """Generate after ``ids``, which follow the loaded cache's, and save the cache if asked.

        Errors are raised on all ranks.
        """
        book, cache = self.opened()
        if book:
            ids = [*book, *ids]
            check_ids(ids, self.settings, self.model.config)
        answer = self.answer(ids, cache)
        self.keep(cache)
        return answer

    def opened(self) -> tuple[list[int], RingCache]:
        """Return the loaded cache and its tokens, or a new cache and no tokens; errors are raised on all ranks."""
        if self.num_beams > 1 and (
            self.settings.load_cache or self.settings.save_cache
        ):
            option = (
                "--save-cache" if self.settings.load_cache is None else "--load-cache"
            )
            raise ConfigError(
                f"{option}: generation_config.json has num_beams = {self.num_beams}, and such a cache is of so many "
                "texts; set it to 1 there, or leave the option out"
            )
        if self.settings.save_cache is not None:
            self._refuse_unsaved()
        cache = self.new_cache()
        if self.settings.load_cache is None:
            return [], cache
        if len(cache.ids) > 1:
            raise ConfigError(
                f"--load-cache {self.settings.load_cache}: holds {len(cache.ids)} texts, must hold one"
            )
        return cache.ids[0].tolist(), cache

    def _refuse_unsaved(self) -> None:
        """Raise UnsupportedError if the model's caches cannot be saved, before a text is read for one."""
        # Only a generated token shows what mechanisms keep in the cache.
        cache = self.model.new_cache()
        decoder = decoder_on_ring(self.model)
        if any(each.cached_numbers(decoder) for each in self.model.ring_mechanisms):
            token = torch.zeros(1, 1, dtype=torch.int64, device=local_device())
            self.model.generate(
                token,
                attention_mask=torch.ones_like(token),
                past_key_values=cache,
                max_new_tokens=1,
                do_sample=False,
                num_beams=1,
                weights=self.settings.weights,
            )
        try:
            refuse_unsaved(self.model, cache)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"--save-cache {self.settings.save_cache}: {error}, without the option"
            ) from None

    def keep(self, cache: RingCache) -> None:
        """Save a cache if the settings say so; raise CheckpointError on all ranks if that fails."""
        if self.settings.save_cache is not None:
            self.observer.doing("saving the cache")
            self.watchdog.be(0, "saving the cache", PATIENCE_SECONDS)
            self.model.save_cache(cache, self.settings.save_cache)

    def answer(self, ids: Sequence[int], cache: RingCache | None = None) -> Answer:
        """Generate after ``ids``, whose beginning the cache may hold already."""
        cache = self.new_cache() if cache is None else cache
        listener = _Listener(self.watchdog, self.tokenizer, self.observer)
        # With beams, no text is known before the end, and transformers does not stream.
        has_beams = self.num_beams > 1
        self.model.ring_on_read = self._on_read(
            len(ids), listener.wrote if has_beams else None
        )
        self.watchdog.be(0, "reading the prompt", PATIENCE_SECONDS)
        prompt = torch.tensor([ids], device=local_device())
        started = time.perf_counter()
        whole = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            streamer=None if has_beams else listener,
            num_return_sequences=1,
            return_dict_in_generate=False,
            weights=self.settings.weights,
            **self.settings.options,
        )
        ended = time.perf_counter()
        new = whole[0, len(ids) :].tolist()
        largest = torch.tensor(cache.nbytes, device=local_device())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        if has_beams:
            self.observer.wrote(text)
        return Answer(
            text=text,
            token_ids=new,
            prefill_seconds=listener.first - started,
            seconds_per_token=(ended - listener.first) / (len(new) - 1)
            if len(new) > 1
            else None,
            cache_bytes_per_rank=int(largest),
        )

    def _on_read(
        self, total: int, wrote: Callable[[int], None] | None
    ) -> Callable[[int], None]:
        def read(tokens: int) -> None:
            if tokens <= total:  # tokens of the prompt, not generated ones
                self.watchdog.be(0, "reading the prompt", PATIENCE_SECONDS)
                self.observer.read(tokens, total)
            if tokens >= total and wrote is not None:
                wrote(tokens - total + 1)

        return read


class _Listener(TextStreamer):
    """A streamer on every rank, for the watchdog, times and the observer."""

    def __init__(
        self, watchdog: Watchdog, tokenizer: Tokenizer, observer: Observer
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._watchdog, self._observer, self._num_tokens, self.first = (
            watchdog,
            observer,
            -1,
            0.0,
        )

    def put(self, value: object) -> None:
        self._num_tokens += 1
        self.wrote(self._num_tokens)
        super().put(value)

    def wrote(self, num_tokens: int) -> None:
        if num_tokens == 1:
            self.first = time.perf_counter()
        if num_tokens:
            self._watchdog.be(num_tokens, "writing", PATIENCE_SECONDS)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._observer.wrote(text)


@contextmanager
def session(
    settings: GenerateSettings,
    config: PreTrainedConfig,
    tokenizer: Tokenizer,
    observer: Observer | None = None,
) -> Iterator[Session]:
    """Yield a folder's model on all ranks, watched while in use; raise RingspanError for anything refused."""
    observer = observer or Observer()
    observer.doing("loading the model")
    model = load_model(settings, config)
    mesh = init_mesh(tp=settings.tp)
    model: Any = parallelize(model, mesh)
    if settings.prefill_tokens is not None:
        model.ring_prefill_tokens = settings.prefill_tokens
    torch.manual_seed(settings.seed)
    limits = Limits(
        silence_seconds=settings.silence_seconds, patience_seconds=PATIENCE_SECONDS
    )
    with Watchdog(limits, None) as watchdog:
        yield Session(settings, model, tokenizer, watchdog, observer)


WAIT_SECONDS: Final = 2.0
"""Seconds that ranks wait for a line before they confirm to each other; process groups have time-outs."""


@dataclass
class Conversation:
    """All tokens of a conversation so far, beginning with a ``book``'s, and its messages for a chat template."""

    tokenizer: Tokenizer
    book: list[int] = field(default_factory=list)
    ids: list[int] = field(init=False)
    messages: list[dict[str, str]] = field(default_factory=list)
    _text: str = ""

    def __post_init__(self) -> None:
        self.ids = list(self.book)

    def ask(
        self, line: str, check: Callable[[list[int]], None] = lambda ids: None
    ) -> bool:
        """Add a user's line; return False if the template dropped old answers, so that the cache is no longer valid."""
        if not self.tokenizer.chat_template:
            start = "\n" if self.ids else ""
            ids = self.ids + self._encode(
                f"{start}{line}\n", add_special_tokens=not self.ids
            )
            check(ids)
            self.ids = ids
            return True
        messages = [*self.messages, {"role": "user", "content": line}]
        text = str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )
        goes_on = text.startswith(self._text)
        new = self._encode(
            text[len(self._text) :] if goes_on else text, add_special_tokens=False
        )
        ids = [*(self.ids if goes_on else self.book), *new]
        check(ids)
        self.ids, self.messages, self._text = ids, messages, text
        return goes_on

    def answered(self, token_ids: list[int]) -> None:
        """Add the model's answer; without a template, drop an end-of-text token, which would end all later text."""
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
        """Return the next line that is not blank, or None if it has not come yet; and True at the end."""
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
            goes_on = conversation.ask(
                line, lambda ids: check_ids(ids, model.settings, model.model.config)
            )
        except ConfigError as error:
            # The command's own prompt: an error ends the command.
            if is_option:
                raise
            model.observer.refused(str(error))
        else:
            if (
                not goes_on
                or model.num_beams > 1
                or model.model.generation_config.prompt_lookup_num_tokens
            ):
                cache = model.new_cache()
            conversation.answered(model.answer(conversation.ids, cache).token_ids)
            model.observer.wrote("\n")
        model.observer.asks()
        line, is_option = None, False
