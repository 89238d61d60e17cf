"""lm-evaluation-harness over the ring. S tokens of a request, C of its continuation, V vocabulary."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from jinja2.exceptions import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.lines import one_line, shortened
from ringspan.evaluate.records import Answers
from ringspan.torch.generate.model import RingGenerator
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.positions import (
    num_trained_positions,
    rotates_by_length,
)
from ringspan.torch.model.tasks.causal_lm import token_logprobs
from ringspan.torch.shard_batch import shard_batch

_NEW_TOKENS: Final = 256  # lm-eval's default for tasks that give no number
_NO_LIMIT: Final = 1 << 62
# Options of generation that lm-eval's own model does not take either, each with a remedy.
_NOT_TAKEN: Final = {
    "num_return_sequences": "an answer is one text; set repeats in the task",
    "pad_token_id": "it is the tokenizer's; leave it out",
    "stop_strings": "name them in until",
}


class RingLM(TemplateLM):
    """A model on the ring as lm-evaluation-harness asks it, on every rank, at any length:

        lm_eval.simple_evaluate(RingLM(model, tokenizer), tasks=["hellaswag"])

    Each gets the results of ``lm_eval.models.huggingface.HFLM`` with batch size 1. A context of several continuations
    is read once. Nothing is truncated.

    Args:
        model: the result of ``rs.parallelize``.
        tokenizer: its tokenizer.
        max_length: positions of the model; its config's when None.
        on_request: called with the next action before each request, with None after the last.
        answers: file of the first process with each answer that is not drawn, from which an interrupted run continues,
            on any number of processes. One per model.

    Raises:
        ConfigError: a ``max_length`` below 1; a tokenizer without end or beginning of text; a request with more tokens
            than positions, no token to score, or invalid settings of generation.
        UnsupportedError: another model; ``answers`` of one whose rotary frequencies follow the longest text so far;
            lm-eval's ``use_cache`` with several processes.
    """

    def __init__(
        self,
        model: RingGenerator,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        on_request: Callable[[str | None], None] = lambda what: None,
        answers: str | Path | None = None,
    ) -> None:
        """Check the arguments, and open the file of answers; raises as the class says."""
        # lm-eval divides requests by rank; this remains rank 0 of 1, since all ranks are one model.
        super().__init__()
        if not hasattr(model, "new_cache"):
            raise UnsupportedError(
                f"RingLM needs what rs.parallelize returned, got a {type(model).__name__}"
            )
        if max_length is not None and max_length < 1:
            raise ConfigError(
                f"max_length {max_length}: should be at least 1, or None for the positions of the config"
            )
        self.model, self.tokenizer = model.eval(), tokenizer
        if self.prefix_token_id is None:
            raise ConfigError(
                "the tokenizer has neither eos_token nor bos_token, after which a text begins; set one"
            )
        config = text_config(model.config)
        self.max_length = max_length or num_trained_positions(config) or _NO_LIMIT
        self._keeps_context = not rotates_by_length(config)
        if answers is not None and not self._keeps_context:
            raise UnsupportedError(
                f"answers={str(answers)!r}: the rotary frequencies of this model depend on the texts that it read "
                "before, and a run that continues has read others; leave it out"
            )
        self._cache: Any = None
        self._on_request = on_request
        self._answers = None if answers is None else Answers(Path(answers))

    @property
    def num_kept(self) -> int:
        """Return the number of an earlier run's answers, on the first process."""
        return 0 if self._answers is None else self._answers.num_kept

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        """Return the token before a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Tokenize a text; add special tokens by default, unless it begins with one."""
        begin = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options = (
            {}
            if add_special_tokens is None
            else {"add_special_tokens": add_special_tokens}
        )
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format a conversation by the template; without the system's part if it takes none."""
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        options["continue_final_message"] = not add_generation_prompt
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            rest = [message for message in chat_history if message["role"] != "system"]
        try:
            return self.tokenizer.apply_chat_template(rest, **options)
        except TemplateError as error:
            raise ConfigError(
                f"the tokenizer's chat template refuses a conversation: {one_line(error)}"
            ) from error

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Set lm-eval's own cache of answers, ``use_cache``."""
        if dist.get_world_size() > 1:
            raise UnsupportedError(
                "use_cache is not supported with several processes: each has a file of its own, and after an "
                "interruption they would ask for different requests; give RingLM a file as answers instead"
            )
        super().set_cache_hook(cache_hook)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return, per continuation after its context, the log-probability and True if it is the likeliest."""
        every: list[Any] = [request.args for request in requests]
        for asked in every:
            if not asked[1]:
                raise _not_scored(asked)
        scored = super().loglikelihood
        return self._continued(
            "loglikelihood",
            requests,
            lambda missing: scored(missing, disable_tqdm=disable_tqdm),
        )

    def _continued(
        self,
        method: str,
        requests: list[Instance],
        answer: Callable[[list[Instance]], list[Any]],
    ) -> list[Any]:
        """Answer only requests that the file of answers lacks; return all answers in the order of the requests."""
        if self._answers is None:
            return answer(requests)
        found = self._answers.known(method, [request.args for request in requests])
        missing = [at for at, known in enumerate(found) if known is None]
        answers = answer([requests[at] for at in missing]) if missing else []
        for at, value in zip(missing, answers, strict=True):
            found[at] = value
        return found

    def _keep(self, method: str, asked: tuple[Any, ...], answer: object) -> None:
        self.cache_hook.add_partial(method, asked, answer)
        if self._answers is not None:
            self._answers.add(method, asked, answer)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Score (names, context, continuation) requests, in an order that reads each shared context once.

        Returns, for each, the continuation's log-probability and whether it is the likeliest. Answers are recorded one
        by one.
        """
        for asked, context, continuation in requests:
            if not (context and continuation):
                raise _not_scored(asked)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(
            range(len(requests)), key=lambda at: self._turn(*requests[at][1:])
        )
        try:
            for at in self._each(
                order,
                "Reading requests",
                "reading a request",
                is_silent=kwargs.get("disable_tqdm"),
            ):
                asked, context, continuation = requests[at]
                found[at] = self._scored(context, continuation)
                self._keep("loglikelihood", asked, found[at])
        finally:
            self._cache = None
        return found

    def _turn(self, context: list[int], continuation: list[int]) -> Any:
        """Return the sort key: shared contexts together; else lm-eval's order, on which dynamic frequencies depend."""
        return (
            context if self._keeps_context else _longest_first(context + continuation)
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each text's log-probability, in windows of all positions if it is longer."""
        return self._continued(
            "loglikelihood_rolling",
            requests,
            lambda missing: self._rolled(missing, disable_tqdm),
        )

    def _rolled(self, requests: list[Instance], is_silent: bool) -> list[float]:
        """Return the log-probabilities of whole texts, each the sum over windows of the model's positions.

        Windows of all texts are scored longest first; a text is kept when its last window is done.
        """
        texts = [str(request.args[0]) for request in requests]
        windows = [
            (at, *make_disjoint_window(window))
            for at, text in enumerate(texts)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=min(self.max_length, _NO_LIMIT),
                context_len=1,
            )
        ]
        windows.sort(key=lambda window: _longest_first(window[1] + window[2]))
        found, left = [0.0] * len(texts), Counter(window[0] for window in windows)
        for at, context, continuation in self._each(
            windows, "Scoring texts", "scoring a text", is_silent=is_silent
        ):
            found[at] += self._logprob(context, continuation)
            left[at] -= 1
            if not left[at]:
                self._keep("loglikelihood_rolling", (texts[at],), found[at])
        return found

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        if self.eot_token_id is None:
            raise ConfigError(
                "the tokenizer has no eos_token, at which lm-eval's answers end; set one"
            )
        return self._continued(
            "generate_until",
            requests,
            lambda missing: self._generated(missing, disable_tqdm),
        )

    def _generated(self, requests: list[Instance], is_silent: bool) -> list[str]:
        """Return an answer to each request, in lm-eval's order of contexts: a random draw depends on earlier ones."""
        every: list[Any] = [request.args for request in requests]
        ordered: Any = Collator(
            every,
            sort_fn=lambda asked: (-len(self.tok_encode(asked[0])), asked[0]),
            group_by="gen_kwargs",
            group_fn=lambda asked: asked[1],
        )
        found = []
        batches = ordered.get_batched(n=1)
        for batch in self._each(
            batches,
            "Writing answers",
            "writing an answer",
            len(requests),
            is_silent=is_silent,
        ):
            ((context, given),) = batch
            found.append(self._written(context, given))
            self._keep("generate_until", (context, given), found[-1])
        return ordered.get_original(found)

    def _written(self, context: str, given: dict[str, Any]) -> str:
        """Generate one answer by the request's settings, cut at its stop sequences.

        ``max_gen_toks`` limits the answer, ``max_length`` context and answer together; ConfigError if the model has
        fewer positions or a setting is not taken.
        """
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, _NEW_TOKENS))
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until", None), eos=eos)
        ids, new = self.tok_encode(context), options.pop("max_gen_toks")
        length = options.pop("max_length", len(ids) + new)  # context plus answer
        self._check(
            length,
            f"a context of {len(ids):,} tokens and {length - len(ids):,} new ones",
        )
        _check_generation(options, length - len(ids))
        if not options["do_sample"]:
            options.pop("temperature", None)
        prompt = self._tensor(ids)
        whole = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            # max_length would give way to a max_new_tokens in the model's own settings.
            max_new_tokens=length - len(ids),
            # transformers' stop_strings may begin in the context, so lm-eval's criteria are used.
            stopping_criteria=[
                stop_sequences_criteria(self.tokenizer, until, len(ids), 1)
            ],
            pad_token_id=self.eot_token_id
            if self.tokenizer.pad_token_id is None
            else self.tokenizer.pad_token_id,
            **options,
        )
        said = self.tokenizer.decode(
            whole[0, len(ids) :].tolist(), skip_special_tokens=True
        )
        return postprocess_generated_text(
            generation=said, stop=until, think_end_token=None
        )

    def _each(
        self,
        items: Iterable[Any],
        title: str,
        doing: str,
        total: int | None = None,
        *,
        is_silent: object,
    ) -> Iterator[Any]:
        for item in tqdm(
            items, title, total, disable=bool(is_silent) or dist.get_rank() > 0
        ):
            self._on_request(doing)
            yield item
        self._on_request(None)

    def _check(self, tokens: int, what: str) -> None:
        if tokens > self.max_length:
            raise ConfigError(
                f"{what} are more than the {self.max_length:,} positions of the model; leave the task out, or scale "
                "its rotary positions (rope_parameters and max_position_embeddings in config.json)"
            )

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.model.device)

    def _scored(
        self, context: list[int], continuation: list[int]
    ) -> tuple[float, bool]:
        logits = self._logits((context + continuation)[:-1], len(continuation))
        targets = torch.tensor(continuation, device=logits.device)
        logprobs = torch.log_softmax(logits.float(), -1)
        value = float(logprobs.gather(-1, targets[:, None]).sum())
        return value, bool((logits.argmax(-1) == targets).all())

    def _logits(self, ids: list[int], count: int) -> Tensor:
        """Return logits (count, V) after the last ``count`` of some tokens (S); the read prefix is kept."""
        self._check(len(ids), f"a request of {len(ids):,} tokens")
        kept = 0
        if self._cache is not None and self._keeps_context:
            kept = _common(self._cache.ids[0].tolist(), ids[: len(ids) - count])
            try:
                self._cache.crop(kept - self._cache.get_seq_length())
            # A sliding window has dropped tokens that the new text still sees.
            except UnsupportedError:
                kept = 0
        if not kept:
            self._cache = self.model.new_cache()
        with torch.no_grad():
            out = self.model(
                self._tensor(ids[kept:]),
                past_key_values=self._cache,
                logits_to_keep=count,
            )
        return out.logits[0, -count:]

    def _logprob(self, context: list[int], continuation: list[int]) -> float:
        """Compute a continuation's log-probability, as long as the model allows, without its logits."""
        ids = context + continuation
        if len(ids) == 1:
            return 0.0
        batch = {
            "input_ids": self._tensor(ids[:-1]),
            "shift_labels": self._tensor(ids[1:]),
        }
        batch["shift_labels"][:, : len(ids) - 1 - len(continuation)] = -100
        with torch.no_grad():
            return float(
                token_logprobs(self.model, shard_batch(batch, self.model.ring_mesh))
                .double()
                .sum()
            )


def _common(before: list[int], now: list[int]) -> int:
    pairs = enumerate(zip(before, now, strict=False))
    return next(
        (at for at, (one, other) in pairs if one != other), min(len(before), len(now))
    )


def _longest_first(ids: list[int]) -> tuple[int, list[int]]:
    return -len(ids), ids


def _not_scored(asked: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the request {shortened(repr(tuple(asked)))} has no token in its context or its continuation; leave the item "
        "out of the task"
    )


def _check_generation(options: dict[str, Any], new: int) -> None:
    """Raise ConfigError for generation settings that lm-eval's own model refuses, or without room for an answer."""
    for name, remedy in _NOT_TAKEN.items():
        if options.get(name) is not None and (name, options[name]) != (
            "num_return_sequences",
            1,
        ):
            raise ConfigError(
                f"generation_kwargs: {name}={options[name]!r} is not taken: {remedy}"
            )
        options.pop(name, None)
    if new < 1:
        raise ConfigError(
            f"generation_kwargs: {new} new tokens; raise max_gen_toks, or max_length, which has the context"
        )
    if options["do_sample"] and not options.get("temperature"):
        raise ConfigError(
            "generation_kwargs: do_sample=True needs a temperature above 0"
        )
