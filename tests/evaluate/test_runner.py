"""Each task on rings of 1, 2 and 3 gives, item by item, the tokens of a plain loop of transformers on one process."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.cli.commands.evaluate import evaluate_ranks
from ringspan.core.errors import ConfigError
from ringspan.evaluate.perplexity import edges
from ringspan.evaluate.prompts import long_documents
from ringspan.evaluate.records import Records, identity, records_file
from ringspan.evaluate.runner import accuracy_rows, loss_rows, normal, wilson
from ringspan.evaluate.settings import PERPLEXITY, EvalSettings
from ringspan.evaluate.tasks import TASKS
from ringspan.torch.runtime.launch import launch
from tests.cases import long
from tests.evaluate.models import TEMPLATE, plain_tokens, save, save_of_words
from tests.torch.generate.models import CONFIGS

LENGTHS = {"common-words": (6_500,), "frequent-words": (1_201,)}
ITEMS = {"common-words": 1}  # its answers are long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Of such a width and depth it says something else for each text.
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    return save(tmp_path_factory.mktemp("models") / "tiny", template=TEMPLATE, **sizes)


def asked(folder: Path, name: str, **changes: Any) -> EvalSettings:
    options: dict[str, Any] = {
        "depths": (0.5,),
        "distractors": 1,
        "prefill_tokens": 333,
        "items": ITEMS.get(name, 2),
    }
    lengths = LENGTHS.get(name, (901,))
    return EvalSettings(
        folder=str(folder), task=name, **{"lengths": lengths, **options, **changes}
    )


@pytest.fixture(scope="module")
def expected(folder):
    """What a plain loop answers to a task, of which one was asked."""
    found: dict[str, list[list[int]]] = {}

    def tokens(name: str) -> list[list[int]]:
        if name not in found:
            found[name] = plain_tokens(asked(folder, name))
        return found[name]

    return tokens


def check(
    settings: EvalSettings, result: dict[str, Any], tokens: list[list[int]]
) -> None:
    """Each item has the tokens of the plain loop, and the score of what they say."""
    records = [
        json.loads(line) for line in Path(result["records"]).read_text().splitlines()
    ]
    assert [record["token_ids"] for record in records] == tokens, settings.task
    assert [row["items"] for row in result["rows"]] == [settings.items]
    tokenizer = AutoTokenizer.from_pretrained(settings.folder)
    score = TASKS[settings.task].score
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    scores = [
        score(text, record["answers"])
        for text, record in zip(said, records, strict=True)
    ]
    assert result["rows"][0]["accuracy"] == sum(scores) / settings.items
    length = settings.lengths[0]
    assert all(length - 400 < record["tokens"] < length for record in records)


@pytest.mark.parametrize("ranks", [2, *long(1, 3)])
def test_all_tasks_answer_as_one_process(folder, expected, tmp_path, ranks):
    # The ten words of one task are most of what would be written here: it has a test of its own.
    items = 2 if ranks == 3 else 1
    every = [
        asked(folder, name, items=items) for name in TASKS if name != "common-words"
    ]
    answers = [
        tuple(tokens)
        for settings in every
        for tokens in expected(settings.task)[:items]
    ]
    # the same on every rank
    assert len(set(answers)) == len(answers)
    for results in launch(evaluate_ranks, ranks, every, str(tmp_path), threads=1):
        for settings, result in zip(every, results, strict=True):
            check(settings, result, expected(settings.task)[:items])


@pytest.mark.parametrize(
    ("ranks", "is_of_bytes"),
    long((2, False), (1, False), (3, False), (1, True), (2, True), (3, True)),
)
def test_common_words_are_those_of_one_process(
    folder, expected, tmp_path, ranks, is_of_bytes
):
    """With a token a word in short, and a token a byte."""
    settings = asked(folder, "common-words")
    if not is_of_bytes:
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "max_position_embeddings": 2048,
        }
        words = save_of_words(tmp_path / "words", **sizes)
        settings = asked(words, "common-words", lengths=(1_800,), items=2)
    wanted = expected("common-words") if is_of_bytes else plain_tokens(settings)
    assert len(set(map(tuple, wanted))) == settings.items and all(
        len(set(tokens)) > 5 for tokens in wanted
    )
    for (result,) in launch(
        evaluate_ranks, ranks, [settings], str(tmp_path), threads=1
    ):
        check(settings, result, wanted)


@pytest.mark.parametrize("kind", ["llama", *long("deepseek_v32", "minimax_m3_vl_text")])
def test_perplexity_is_that_of_one_process(folder, tmp_path, kind):
    if kind != "llama":
        folder = save(
            tmp_path / kind, model_type=kind, num_hidden_layers=4, **CONFIGS[kind]
        )
    settings = EvalSettings(
        folder=str(folder), task=PERPLEXITY, lengths=(333,), items=2
    )
    ((result,), _) = launch(evaluate_ranks, 2, [settings], str(tmp_path), threads=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    for _, text in long_documents()[:2]:
        ids = tokenizer(text[:5000], return_tensors="pt").input_ids[:, :333]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
        losses.append(
            torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        )
    whole = torch.stack(losses)
    assert edges(333) == [64, 128, 256, 333]
    start = 1
    for row, stop in zip(result["rows"], (64, 128, 256, 333), strict=True):
        part = whole[:, start - 1 : stop - 1]
        assert (row["start"], row["length"], row["items"]) == (start, stop, 2)
        assert row["loss"] == pytest.approx(float(part.mean()), rel=1e-6)
        assert row["bits_per_byte"] == pytest.approx(
            float(part.mean()) / torch.log(torch.tensor(2.0)).item(), rel=0.02
        )
        start = stop


def adapter(place: Path, base: Path) -> Path:
    """The folder of an adapter, whose own files say nothing of its base model's."""
    folder = place / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base)})
    )
    return folder


def file_of(out: Path, settings: EvalSettings) -> Path:
    return records_file(out, settings.task, settings.folder, identity(settings))


def test_records_of_an_adapter_begin_anew_with_another_base(tmp_path):
    base = save(tmp_path / "base")
    settings = EvalSettings(folder=str(adapter(tmp_path, base)), task="lines")
    before = file_of(tmp_path, settings)
    assert file_of(tmp_path, settings) == before
    save(base, seed=1)
    assert file_of(tmp_path, settings) != before


def test_records_of_an_earlier_version_are_not_continued(folder, tmp_path, monkeypatch):
    settings = EvalSettings(folder=str(folder), task="lines")
    before = file_of(tmp_path, settings)
    monkeypatch.setattr("ringspan.evaluate.records.VERSION", 0)
    assert file_of(tmp_path, settings) != before


HELD: list[Records] = []


def hold(mesh, path):
    """As another evaluation; without a path it has ended."""
    if path is None:
        HELD.pop().lock.give_back()
    else:
        HELD.append(Records(path))
        HELD[-1].load()


def test_a_second_evaluation_into_one_file_is_refused(pool, tmp_path):
    path = tmp_path / "lines-model-0.jsonl"
    pool.run(hold, 1, path)
    with pytest.raises(
        ConfigError,
        match=r"is being written by process \d+ on .*; wait for it, or .* --out",
    ):
        Records(path).load()
    Records(tmp_path / "lines-other-0.jsonl").load()
    pool.run(hold, 1, None)
    Records(path).load()


def test_records_continue_after_a_line_that_was_cut(folder, tmp_path):
    settings = EvalSettings(folder=str(folder), task="lines", items=3)
    records = Records(file_of(tmp_path, settings))
    records.load()
    records.add({"key": [1024, None, 0], "score": 1.0})
    with open(records.path, "a") as file:
        file.write('{"key": [1024, None')
    again = Records(file_of(tmp_path, settings))
    again.load()
    assert list(again.by_key) == [(1024, None, 0)]
    again.add({"key": [1024, None, 1], "score": 0.0})
    assert len(again.path.read_text().splitlines()) == 2
    # More items or lengths continue; another seed, text or model begins anew.
    for changes, is_same in (
        ({"items": 9}, True),
        ({"lengths": (7,)}, True),
        ({"seed": 1}, False),
        ({"plain": True}, False),
        ({"folder": str(adapter(tmp_path, folder))}, False),
    ):
        other = EvalSettings(
            **{"folder": str(folder), "task": "lines", "items": 3, **changes}
        )
        assert (file_of(tmp_path, other) == records.path) is is_same
    records.path.write_text("what?\n")
    with pytest.raises(ConfigError, match="damaged; delete it"):
        again.load()


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.5, 100, 0.4038, 0.5962),
        (0.81, 263, 0.7583, 0.8528),
    ],
)
def test_wilsons_interval(mean, count, low, high):
    # statsmodels.stats.proportion.proportion_confint(..., method="wilson")
    assert wilson(mean, count) == pytest.approx((low, high), abs=2e-4)


def test_rows_of_accuracy_are_by_length_and_depth():
    records = [
        {"length": 20, "depth": 0.0, "score": 1.0},
        {"length": 10, "depth": 1.0, "score": 0.5},
        {"length": 10, "depth": 0.0, "score": 0.0},
        {"length": 10, "depth": 1.0, "score": 1.0},
    ]
    rows = accuracy_rows(records)
    assert [
        (row["length"], row["depth"], row["accuracy"], row["items"]) for row in rows
    ] == [
        (10, 0.0, 0.0, 1),
        (10, 1.0, 0.75, 2),
        (20, 0.0, 1.0, 1),
    ]
    assert "depth" not in accuracy_rows([{"length": 1, "depth": None, "score": 1.0}])[0]


def test_rows_of_loss_weigh_tokens_and_bytes():
    parts = [
        {"start": 1, "stop": 4, "nats": 3.0, "tokens": 3, "bytes": 6},
        {"start": 4, "stop": 8, "nats": 8.0, "tokens": 4, "bytes": None},
    ]
    first, second = loss_rows(
        [{"parts": parts}, {"parts": [{**parts[0], "nats": 9.0, "bytes": 10}]}]
    )
    assert first["loss"] == 2.0 and first["items"] == 2
    assert first["bits_per_byte"] == pytest.approx(12 / 16 / math.log(2))
    assert (first["low"], first["high"]) == pytest.approx(
        (2 - 1.96 * math.sqrt(2) / math.sqrt(2), 3.96), abs=1e-3
    )
    assert second["bits_per_byte"] is None and second["low"] is None
    assert normal([1.0]) is None
