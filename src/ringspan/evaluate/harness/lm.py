"""lm-evaluation-harness over the ring: ``RingLM`` is an ``lm_eval`` LM, and every rank makes the same calls.

S tokens of a request, C of its continuation, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.lines import one_line
from ringspan.evaluate.harness.settings import HarnessSettings
from ringspan.generate.folder import load_config, load_tokenizer
from ringspan.generate.session import PATIENCE_SECONDS, session
from ringspan.torch.data.batch import shard_batch
from ringspan.torch.layers.decoder import text_config
from ringspan.torch.layers.positions import num_trained_positions
from ringspan.torch.model.tasks.logprobs import token_logprobs

_NEW_TOKENS: Final = 256  # lm-eval's own number where a task names none
_NO_LIMIT: Final = 1 << 62
_simple_evaluate: Any = simple_evaluate  # its decorator hides its parameters


class RingLM(TemplateLM):
    """A model on the ring as lm-evaluation-harness asks it, at any length:

        lm_eval.simple_evaluate(RingLM(model, tokenizer), tasks=["hellaswag"])

    on every rank. Each gets the results of ``lm_eval.models.huggingface.HFLM`` with a batch size of 1. A context that
    several continuations share is read once. Nothing is truncated.

    Args:
        model: what ``rs.parallelize`` returned.
        tokenizer: its tokenizer.
        max_length: positions of the model; those of its config when None.
        on_request: told what is done next, before each request.

    Raises:
        ConfigError: for a request that has more tokens than there are positions.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        on_request: Callable[[str], None] = lambda what: None,
    ) -> None:
        super().__init__()
        if not hasattr(model, "new_cache"):
            raise UnsupportedError(f"RingLM needs what rs.parallelize returned, got a {type(model).__name__}")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_length = max_length or num_trained_positions(text_config(model.config)) or _NO_LIMIT
        self._cache: Any = None
        self._on_request = on_request

    # lm-eval divides requests among processes by these two; here all processes answer each request together.
    @property
    def rank(self) -> int:
        """0 everywhere."""
        return 0

    @property
    def world_size(self) -> int:
        """1: all ranks are one model."""
        return 1

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm-eval's own cache of answers."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text, with the tokenizer's special ones unless told otherwise, or it begins with one."""
        begin = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the tokenizer's template writes it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation after its context: the log-probability, and whether it is the likeliest."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda at: requests[at][1])  # those that share a context, together
        shown = tqdm(order, desc="Reading requests", disable=not self._shows(kwargs))
        for at in shown:
            self._on_request("reading a request")
            asked, context, continuation = requests[at]
            logits = self._logits((context + continuation)[:-1], len(continuation))
            logprobs = torch.log_softmax(logits.float(), -1)
            targets = torch.tensor(continuation, device=logits.device)
            value = float(logprobs.gather(-1, targets[:, None]).sum())
            found[at] = value, bool((logits.argmax(-1) == targets).all())
            self.cache_hook.add_partial("loglikelihood", asked, found[at])
        self._cache = None
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows of all positions where it is longer."""
        found = []
        for request in tqdm(requests, desc="Scoring texts", disable=not self._shows({"disable_tqdm": disable_tqdm})):
            self._on_request("scoring a text")
            string = str(request.args[0])
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(string),
                prefix_token=self.prefix_token_id,
                max_seq_len=min(self.max_length, _NO_LIMIT),
                context_len=1,
            )
            total = sum(self._logprob(*make_disjoint_window(window)) for window in windows)
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), total)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, until one of the task's strings."""
        found = []
        for request in tqdm(requests, desc="Writing answers", disable=not self._shows({"disable_tqdm": disable_tqdm})):
            self._on_request("writing an answer")
            arguments: Any = request.args
            context, given = arguments
            options: dict[str, Any] = dict(normalize_gen_kwargs(given, _NEW_TOKENS))
            eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
            until = handle_stop_sequences(options.pop("until", None), eos=eos)
            new = options.pop("max_gen_toks")
            if not options.get("do_sample"):
                options = {name: value for name, value in options.items() if name != "temperature"}
            ids = self.tok_encode(context)
            self._check(len(ids) + new, f"a context of {len(ids):,} tokens and {new:,} new ones")
            prompt = self._tensor(ids)
            whole = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new,
                stop_strings=[each for each in until if each],
                tokenizer=self.tokenizer,
                pad_token_id=self.eot_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id,
                **options,
            )
            said = self.tokenizer.decode(whole[0, len(ids) :].tolist(), skip_special_tokens=True)
            found.append(postprocess_generated_text(generation=said, stop=until, think_end_token=None))
            self.cache_hook.add_partial("generate_until", (context, given), found[-1])
        return found

    def _shows(self, options: dict[str, Any]) -> bool:
        return dist.get_rank() == 0 and not options.get("disable_tqdm")

    def _check(self, tokens: int, what: str) -> None:
        if tokens > self.max_length:
            raise ConfigError(
                f"{what} are more than the {self.max_length:,} positions of the model; leave the task out, or scale "
                "its rotary positions (rope_parameters and max_position_embeddings in config.json)"
            )

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.model.device)

    def _logits(self, ids: list[int], count: int) -> Tensor:
        """Logits (count, V) after the last ``count`` of some tokens (S); what was read before is kept."""
        self._check(len(ids), f"a request of {len(ids):,} tokens")
        kept = 0
        if self._cache is not None:
            kept = _common(self._cache.ids[0].tolist(), ids[: len(ids) - count])
            try:
                self._cache.crop(kept - self._cache.get_seq_length())
            except UnsupportedError:  # a window has dropped what the new text still sees
                kept = 0
        if not kept:
            self._cache = self.model.new_cache()
        with torch.no_grad():
            out = self.model(self._tensor(ids[kept:]), past_key_values=self._cache, logits_to_keep=count)
        return out.logits[0, -count:]

    def _logprob(self, context: list[int], continuation: list[int]) -> float:
        """Of a continuation as long as the model allows, without its logits."""
        ids = context + continuation
        if len(ids) == 1:
            return 0.0
        batch = {"input_ids": self._tensor(ids[:-1]), "shift_labels": self._tensor(ids[1:])}
        batch["shift_labels"][:, : len(ids) - 1 - len(continuation)] = -100
        with torch.no_grad():
            return float(token_logprobs(self.model, shard_batch(batch, self.model.ring_mesh)).double().sum())


def _common(before: list[int], now: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(before), len(now)))


def known_tasks(include: str | None, names: Sequence[str]) -> TaskManager:
    """The tasks of a folder; with those of lm-eval, which take ten seconds to read, where the names need them."""
    if include is not None:
        own = TaskManager(include_path=include, include_defaults=False)
        if all(own.match_tasks([name]) for name in names):
            return own
    return TaskManager(include_path=include)


def check_tasks(names: Sequence[str], manager: TaskManager) -> None:
    """Refuse names that no task, group or tag has.

    Raises:
        ConfigError: with the nearest names.
    """
    from difflib import get_close_matches

    for name in names:
        if not manager.match_tasks([name]):
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see `lm_eval ls tasks`"
            raise ConfigError(f"--tasks {name}: lm-eval knows no such task{hint}")


def run_tasks(lm: RingLM, names: Sequence[str], manager: TaskManager, **options: Any) -> dict[str, Any]:
    """``simple_evaluate`` on every rank.

    Raises:
        ConfigError: a task whose data are not on this machine, and cannot be downloaded.
    """
    try:
        return _simple_evaluate(lm, tasks=list(names), task_manager=manager, bootstrap_iters=0, **options)
    except (OSError, ConnectionError) as error:
        raise ConfigError(f"--tasks {','.join(names)}: {one_line(error)}") from error


def run_harness(settings: HarnessSettings) -> dict[str, Any]:
    """One rank's part of ``ringspan eval harness``; what ``--json`` prints, on every rank."""
    if dist.get_rank():
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = known_tasks(settings.include, settings.tasks)
    check_tasks(settings.tasks, manager)
    config = load_config(settings.generating)
    tokenizer = load_tokenizer(settings.folder, config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{settings.folder}: its tokenizer has no eos_token, at which lm-eval's answers end; set one")
    if settings.chat and not tokenizer.chat_template:
        raise ConfigError(f"--chat: the tokenizer of {settings.folder} has no chat template; leave --chat out")
    with session(settings.generating, config, tokenizer) as model:
        lm = RingLM(model.model, tokenizer, on_request=lambda what: model.watchdog.be(0, what, PATIENCE_SECONDS))
        found = run_tasks(
            lm,
            settings.tasks,
            manager,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            apply_chat_template=settings.chat,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    return {"task": "harness", "model": settings.folder, "rows": rows_of(found), "skipped": [], "seed": settings.seed}


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per task and metric."""
    counts = found.get("n-samples", {})
    return [
        {
            "name": name,
            "metric": metric.removesuffix(",none"),
            "value": value,
            "items": counts.get(name, {}).get("effective"),
        }
        for name, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    ]
