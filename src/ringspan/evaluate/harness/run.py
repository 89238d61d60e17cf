"""lm-eval's tasks with a folder's model: ``ringspan eval harness`` on every rank."""

import logging
import math
import sys
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import one_line
from ringspan.evaluate.harness.lm import RingLM
from ringspan.evaluate.records import records_file
from ringspan.evaluate.settings import HarnessSettings
from ringspan.generate.folder import load_config, load_tokenizer
from ringspan.generate.session import PATIENCE_SECONDS, Session, session
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.positions import rotates_by_length

_simple_evaluate: Any = simple_evaluate  # its decorator hides its parameters


def known_tasks(include: str | None, names: Sequence[str]) -> TaskManager:
    """Return a manager of a folder's tasks, with lm-eval's only if names need them: reading these takes ten seconds."""
    if include is not None:
        own = TaskManager(include_path=include, include_defaults=False)
        if all(own.match_tasks([name]) for name in names):
            return own
    return TaskManager(include_path=include)


def check_tasks(names: Sequence[str], manager: TaskManager) -> None:
    from difflib import get_close_matches

    for name in names:
        if not manager.match_tasks([name]):
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else "; see `lm_eval ls tasks`"
            )
            raise ConfigError(f"--tasks {name}: lm-eval knows no such task{hint}")


def run_tasks(
    lm: object, names: Sequence[str], manager: TaskManager, **options: object
) -> dict[str, Any] | None:
    """Run ``simple_evaluate`` on every rank; return its results on each machine's first rank, as lm-eval does."""
    # Keep the order in which tasks were asked for.
    tasks = list(
        dict.fromkeys(task for name in names for task in manager.match_tasks([name]))
    )
    try:
        return _simple_evaluate(
            lm, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options
        )
    except (OSError, ValueError) as error:
        is_of_request = isinstance(error, ValueError) and not str(error).startswith(
            "Attempted to run task"
        )
        # An error of a request is raised as it is; one from before the first request is about the tasks.
        if is_of_request:
            raise
        raise ConfigError(f"--tasks {','.join(names)}: {one_line(error)}") from error


def run_harness(settings: HarnessSettings, out: Path) -> dict[str, Any] | None:
    """Run a rank's part; return ``--json``'s object on each machine's first rank. Answers in ``out`` are reused."""
    if dist.get_rank():
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = known_tasks(settings.include, settings.tasks)
    check_tasks(settings.tasks, manager)
    config = load_config(settings.generating())
    tokenizer = load_tokenizer(settings.folder, config, chats=settings.chat)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{settings.folder}: its tokenizer has no eos_token, at which lm-eval's answers end; set one"
        )
    if settings.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"--chat: the tokenizer of {settings.folder} has no chat template; leave --chat out"
        )
    answers = None
    if not rotates_by_length(text_config(config)):
        # Requests are identified by their text, so settings are no part of the file's name.
        answers = records_file(
            out, "harness", settings.folder, {"dtype": settings.dtype}
        )
    with session(settings.generating(), config, tokenizer) as model:
        lm = RingLM(
            model.model,
            tokenizer,
            on_request=lambda what: _beat(model, what),
            answers=answers,
        )
        if lm.num_kept:
            print(
                f"{lm.num_kept} answers are in {answers}; continuing after them",
                file=sys.stderr,
                flush=True,
            )
        model.model.ring_on_read = lambda tokens: _beat(
            model, f"at token {tokens:,} of a request"
        )
        _beat(model, None)
        found = run_tasks(
            lm,
            settings.tasks,
            manager,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            apply_chat_template=settings.chat,
            **settings.seeds,
        )
    if found is None:
        return None
    return {
        "task": "harness",
        "model": settings.folder,
        "rows": rows_of(found),
        "skipped": [],
        "seed": settings.seed,
        "records": None if answers is None else str(answers),
    }


def _beat(model: Session, what: str | None) -> None:
    """Report progress to the watchdog; None while lm-eval prepares or scores, which may take any time."""
    if what is None:
        model.watchdog.be(0, "preparing requests or scoring answers", math.inf)
    else:
        model.watchdog.be(0, what, PATIENCE_SECONDS)


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    counts = found.get("n-samples", {})
    return [
        {
            "name": name,
            "metric": metric.removesuffix(",none"),
            "value": float(value),
            "items": counts.get(name, {}).get("effective"),
        }
        for name, values in found["results"].items()
        for metric, value in values.items()
        if "," in metric and isinstance(value, Real) and "_stderr" not in metric
    ]
