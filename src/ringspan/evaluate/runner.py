"""Runner of a task with a model, on every rank; the first one keeps the records."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, TypedDict

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ringspan.core.errors import ConfigError
from ringspan.evaluate.perplexity import Document, chosen, measure
from ringspan.evaluate.prompts import Prompts, Question, long_documents
from ringspan.evaluate.records import Records, identity, records_file
from ringspan.evaluate.settings import PERPLEXITY, EvalSettings
from ringspan.evaluate.tasks import TASKS
from ringspan.generate.folder import check_ids, load_config, load_tokenizer
from ringspan.generate.session import Observer, Session, session
from ringspan.torch.engine.transport.collectives import from_first_rank
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.positions import num_trained_positions

Key = tuple[Any, ...]


@dataclass
class EvalObserver(Observer):
    did: Callable[[int, int, str], None] = lambda done, total, what: None
    noticed: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Plan:
    keys: list[Key]
    skipped: list[dict[str, Any]]
    make: Callable[[Key], Question | Document]


class EvalResult(TypedDict):
    task: str
    model: str
    rows: list[dict[str, Any]]  # rows of ``accuracy_rows`` or ``loss_rows``
    skipped: list[dict[str, Any]]  # skipped lengths, with reasons
    seed: int
    records: str  # the file with each item, its answer and its score


def plans(every: Sequence[EvalSettings]) -> list[Plan | None]:
    """Plan all models before any is evaluated: on the first rank, None on others; an error raises on all ranks."""
    found: list[Plan | None] = []

    def make() -> None:
        for settings in every:
            config = load_config(settings.generating())
            tokenizer = load_tokenizer(settings.folder, config, chats=settings.chats)
            try:
                found.append(plan(settings, config, tokenizer))
            except ConfigError as error:
                if len(every) == 1:
                    raise
                raise ConfigError(f"{settings.folder}: {error}") from error

    from_first_rank(make)
    return found or [None] * len(every)


def plan(
    settings: EvalSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Plan:
    """Plan all items that fit the model; raise ConfigError if none does or a length is below the shortest prompt."""
    limit = num_trained_positions(text_config(config))
    fits = [length for length in settings.lengths if limit is None or length <= limit]
    skipped: list[dict[str, Any]] = [
        {"length": length, "why": f"the model has {limit:,} positions"}
        for length in settings.lengths
        if length not in fits
    ]
    if not fits:
        option = "--length" if settings.task == PERPLEXITY else "--lengths"
        raise ConfigError(
            f"{option} {','.join(map(str, settings.lengths))}: the model has {limit:,} positions; give shorter ones, "
            "or scale its rotary positions (rope_parameters and max_position_embeddings in config.json)"
        )
    if settings.task == PERPLEXITY:
        found, missing = chosen(
            long_documents(settings.text), settings, fits, tokenizer
        )
        skipped += missing
        return Plan(list(found), skipped, found.__getitem__)
    prompts = Prompts(settings, tokenizer)
    for length in fits:
        prompts.question(length, 0.0, 0)
    keys: list[Key] = [
        (length, depth, index)
        for length, depth in settings.cells
        if length in fits
        for index in range(settings.items)
    ]
    return Plan(keys, skipped, lambda key: prompts.question(*key))


def evaluate_rank(
    settings: EvalSettings,
    planned: Plan | None,
    out: str,
    observer: EvalObserver | None = None,
) -> EvalResult:
    """Run a rank's part of the plan; return the ``--json`` result on every rank."""
    config = load_config(settings.generating(1))
    tokenizer = load_tokenizer(settings.folder, config, chats=settings.chats)
    observer = observer or EvalObserver()
    records = Records(
        records_file(Path(out), settings.task, settings.folder, identity(settings))
    )

    def begin() -> list[Key]:
        assert planned is not None, "on the first rank"
        records.load()
        for each in planned.skipped:
            observer.noticed(f"skipped: {each['length']:,} tokens, {each['why']}")
        done = sum(key in records.by_key for key in planned.keys)
        if done:
            observer.noticed(
                f"{done} of {len(planned.keys)} items are in {records.path}; continuing after them"
            )
        return [key for key in planned.keys if key not in records.by_key]

    with records.lock:
        if missing := from_first_rank(begin):
            with session(settings.generating(), config, tokenizer, observer) as model:
                for place, key in enumerate(missing):
                    item: Any = from_first_rank(
                        lambda key=key: planned.make(key) if planned else None
                    )
                    is_text = isinstance(item, Document)
                    record = (
                        measure(model, item)
                        if is_text
                        else _answered(model, settings, item, key)
                    )
                    if planned is not None:
                        records.add({"key": list(key), "place": place, **record})
                        done = len(planned.keys) - len(missing) + place + 1
                        observer.did(done, len(planned.keys), record["summary"])
        return from_first_rank(lambda: result(settings, planned, records))


def result(
    settings: EvalSettings, planned: Plan | None, records: Records
) -> EvalResult:
    """Return the result of a task with rows over all planned items; called on the first rank."""
    assert planned is not None, "on the first rank"
    rows_of = loss_rows if settings.task == PERPLEXITY else accuracy_rows
    return {
        "task": settings.task,
        "model": settings.folder,
        "rows": rows_of(records.by_key[key] for key in planned.keys),
        "skipped": planned.skipped,
        "seed": settings.seed,
        "records": str(records.path),
    }


def _answered(
    model: Session, settings: EvalSettings, question: Question, key: Key
) -> dict[str, Any]:
    """Have the model answer a question; return the item's record with the answer and its score from 0 to 1."""
    length, depth, _ = key
    model.settings = settings.generating(question.max_new_tokens)
    check_ids(question.ids, model.settings, model.model.config)
    answer = model.answer(question.ids)
    score = TASKS[settings.task].score(answer.text, question.answers)
    where = f"{length:,} tokens" + ("" if depth is None else f", depth {depth:g}")
    return {
        "length": length,
        "depth": depth,
        "tokens": len(question.ids),
        "answers": question.answers,
        "said": answer.text,
        "token_ids": answer.token_ids,
        "score": score,
        "summary": f"{where}: {'right' if score == 1 else 'wrong' if score == 0 else f'{score:.0%}'}",
    }


Z_95: Final = 1.959963984540054


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Compute the 95% interval of a share, after Wilson (1927); wide for scores within 0..1 with this mean."""
    if count < 1:
        return 0.0, 1.0
    square = Z_95**2 / count
    middle = (mean + square / 2) / (1 + square)
    reach = (
        Z_95
        / (1 + square)
        * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    )
    return max(0.0, middle - reach), min(1.0, middle + reach)


def normal(values: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95% interval of a mean by the values' spread; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, reach = fmean(values), Z_95 * stdev(values) / math.sqrt(len(values))
    return mean - reach, mean + reach


def accuracy_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per length and depth: the mean score, the number of items and the ends of its 95% interval."""
    groups: dict[tuple[int, float | None], list[float]] = {}
    for record in records:
        groups.setdefault((record["length"], record["depth"]), []).append(
            record["score"]
        )
    rows = []
    for (length, depth), scores in sorted(
        groups.items(), key=lambda group: (group[0][0], group[0][1] or 0.0)
    ):
        low, high = wilson(accuracy := fmean(scores), len(scores))
        row: dict[str, Any] = {"length": length} | (
            {} if depth is None else {"depth": depth}
        )
        rows.append(
            row | {"accuracy": accuracy, "items": len(scores), "low": low, "high": high}
        )
    return rows


def loss_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per position range: mean loss over its tokens in all documents, in nats and bits per byte."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in records:
        for part in record["parts"]:
            groups.setdefault((part["start"], part["stop"]), []).append(part)
    rows = []
    for (start, stop), parts in sorted(groups.items()):
        nats, tokens = (
            sum(part["nats"] for part in parts),
            sum(part["tokens"] for part in parts),
        )
        size = (
            None
            if any(part["bytes"] is None for part in parts)
            else sum(part["bytes"] for part in parts)
        )
        interval = normal([part["nats"] / part["tokens"] for part in parts])
        rows.append(
            {
                "length": stop,
                "start": start,
                "loss": nats / tokens,
                "bits_per_byte": nats / math.log(2) / size if size else None,
                "items": len(parts),
                "low": interval and interval[0],
                "high": interval and interval[1],
            }
        )
    return rows
