"""A model on the ring that answers prompts; every rank runs it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.generation.streamers import BaseStreamer, TextStreamer

from ringspan.core.errors import ConfigError
from ringspan.generate.folder import check_ids, load_model
from ringspan.generate.settings import GenerateSettings
from ringspan.torch.consistency.watchdog import Limits, Watchdog
from ringspan.torch.parallelize import parallelize
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.runtime.mesh import init_mesh

PATIENCE_SECONDS: Final = 600.0  # for ranks that are heard, and exchange nothing


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
        """Beams of the model's generation_config. A cache of several beams cannot continue."""
        return self.model.generation_config.num_beams or 1

    def new_cache(self) -> Any:
        """Return an empty cache, or the one that the settings name. Errors are raised on all ranks."""
        dtype = None if self.settings.cache_dtype == "auto" else self.settings.cache_dtype
        if self.settings.load_cache is None:
            return self.model.new_cache(dtype)
        self.observer.doing("loading the cache")
        self.watchdog.be(0, "loading the cache", PATIENCE_SECONDS)
        return self.model.load_cache(self.settings.load_cache, dtype)

    def answer_once(self, ids: Sequence[int]) -> Answer:
        """Generate after ``ids``, which follow the loaded cache's; save the cache if asked; errors are all ranks'."""
        book, cache = self.opened()
        if book:
            ids = [*book, *ids]
            check_ids(ids, self.settings, self.model.config)
        answer = self.answer(ids, cache)
        self.keep(cache)
        return answer

    def opened(self) -> tuple[list[int], Any]:
        """Return the named cache and its tokens, or a new one and none; errors are all ranks'."""
        if self.num_beams > 1 and (self.settings.load_cache or self.settings.save_cache):
            option = "--save-cache" if self.settings.load_cache is None else "--load-cache"
            raise ConfigError(
                f"{option}: generation_config.json has num_beams = {self.num_beams}, and such a cache is of so many "
                "texts; set it to 1 there, or leave the option out"
            )
        cache = self.new_cache()
        if self.settings.load_cache is None:
            return [], cache
        if len(cache.ids) > 1:
            raise ConfigError(f"--load-cache {self.settings.load_cache}: holds {len(cache.ids)} texts, must hold one")
        return cache.ids[0].tolist(), cache

    def keep(self, cache: Any) -> None:
        """Save a cache if the settings say so; raise CheckpointError on all ranks if that fails."""
        if self.settings.save_cache is not None:
            self.observer.doing("saving the cache")
            self.watchdog.be(0, "saving the cache", PATIENCE_SECONDS)
            self.model.save_cache(cache, self.settings.save_cache)

    def answer(self, ids: Sequence[int], cache: Any = None) -> Answer:
        """Generate after ``ids``, whose beginning the cache may hold already."""
        cache = self.new_cache() if cache is None else cache
        listener = _Listener(self.watchdog, self.tokenizer, self.observer)
        has_beams = self.num_beams > 1  # no text is known before their end, and transformers streams none
        self.model.ring_on_read = self._on_read(len(ids), listener.wrote if has_beams else None)
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
            seconds_per_token=(ended - listener.first) / (len(new) - 1) if len(new) > 1 else None,
            cache_bytes_per_rank=int(largest),
        )

    def _on_read(self, total: int, wrote: Callable[[int], None] | None) -> Callable[[int], None]:
        def read(tokens: int) -> None:
            if tokens <= total:  # of the prompt, not of what follows
                self.watchdog.be(0, "reading the prompt", PATIENCE_SECONDS)
                self.observer.read(tokens, total)
            if tokens >= total and wrote is not None:
                wrote(tokens - total + 1)

        return read


class _Listener(BaseStreamer):
    """A streamer on every rank for the watchdog and times; rank 0 passes text to the observer."""

    def __init__(self, watchdog: Watchdog, tokenizer: Tokenizer, observer: Observer) -> None:
        self._watchdog, self._num_tokens, self.first = watchdog, -1, 0.0
        self._text = _Text(tokenizer, observer) if dist.get_rank() == 0 else None

    def put(self, value: Any) -> None:
        self._num_tokens += 1
        self.wrote(self._num_tokens)
        if self._text is not None:
            self._text.put(value)

    def wrote(self, num_tokens: int) -> None:
        if num_tokens == 1:
            self.first = time.perf_counter()
        if num_tokens:
            self._watchdog.be(num_tokens, "writing", PATIENCE_SECONDS)

    def end(self) -> None:
        if self._text is not None:
            self._text.end()


class _Text(TextStreamer):
    def __init__(self, tokenizer: Any, observer: Observer) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._observer = observer

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._observer.wrote(text)


@contextmanager
def session(
    settings: GenerateSettings, config: PreTrainedConfig, tokenizer: Tokenizer, observer: Observer | None = None
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
    limits = Limits(silence_seconds=settings.silence_seconds, patience_seconds=PATIENCE_SECONDS)
    with Watchdog(limits, None) as watchdog:
        yield Session(settings, model, tokenizer, watchdog, observer)
