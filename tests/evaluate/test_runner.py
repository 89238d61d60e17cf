"""Each task on rings of 1, 2 and 3 gives, item by item, the tokens of a plain loop of transformers on one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringspan.cli.commands.evaluate import evaluate_ranks
from ringspan.core.errors import ConfigError
from ringspan.evaluate.documents import long_documents
from ringspan.evaluate.perplexity import edges
from ringspan.evaluate.records import Records
from ringspan.evaluate.settings import PERPLEXITY, EvalSettings
from ringspan.evaluate.tasks import TASKS
from ringspan.torch.runtime.launch import launch
from tests.evaluate.models import TEMPLATE, plain_tokens, save
from tests.long import long

LENGTHS = {"common-words": (6_500,), "frequent-words": (1_201,)}
ITEMS = {"common-words": 1}  # its answers are long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tiny", template=TEMPLATE, max_position_embeddings=8192)


def every(folder: Path) -> list[EvalSettings]:
    options: dict[str, Any] = {"depths": (0.5,), "distractors": 1, "prefill_tokens": 333}
    lengths = {name: LENGTHS.get(name, (901,)) for name in TASKS}
    return [
        EvalSettings(folder=str(folder), task=name, lengths=lengths[name], items=ITEMS.get(name, 2), **options)
        for name in TASKS
    ]


@pytest.fixture(scope="module")
def expected(folder):
    return [plain_tokens(settings) for settings in every(folder)]


@pytest.mark.parametrize("ranks", [3, *long(1, 2)])
def test_all_tasks_answer_as_one_process(folder, expected, tmp_path, ranks):
    # The ten words of one task are most of what is written here: two ranks do.
    asked = [settings for settings in every(folder) if ranks == 2 or settings.task != "common-words"]
    tokens_of = dict(zip(TASKS, expected, strict=True))
    for results in launch(evaluate_ranks, ranks, asked, str(tmp_path), threads=1):  # the same on every rank
        for settings, result in zip(asked, results, strict=True):
            tokens = tokens_of[settings.task]
            records = [json.loads(line) for line in Path(result["records"]).read_text().splitlines()]
            assert [record["token_ids"] for record in records] == tokens, settings.task
            assert [row["items"] for row in result["rows"]] == [settings.items]
            tokenizer = AutoTokenizer.from_pretrained(folder)
            score = TASKS[settings.task].score
            said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
            scores = [score(text, record["answers"]) for text, record in zip(said, records, strict=True)]
            assert result["rows"][0]["accuracy"] == sum(scores) / settings.items
            length = settings.lengths[0]
            assert all(length - 400 < record["tokens"] < length for record in records)


def test_perplexity_is_that_of_one_process(folder, tmp_path):
    settings = EvalSettings(folder=str(folder), task=PERPLEXITY, lengths=(333,), items=2)
    ((result,), _) = launch(evaluate_ranks, 2, [settings], str(tmp_path), threads=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    for _, text in long_documents()[:2]:
        ids = tokenizer(text[:5000], return_tensors="pt").input_ids[:, :333]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    whole = torch.stack(losses)
    assert edges(333) == [64, 128, 256, 333]
    start = 1
    for row, stop in zip(result["rows"], (64, 128, 256, 333), strict=True):
        part = whole[:, start - 1 : stop - 1]
        assert (row["start"], row["length"], row["items"]) == (start, stop, 2)
        assert row["loss"] == pytest.approx(float(part.mean()), rel=1e-6)
        assert row["bits_per_byte"] == pytest.approx(float(part.mean()) / torch.log(torch.tensor(2.0)).item(), rel=0.02)
        start = stop


def adapter(place: Path, base: Path) -> Path:
    """The folder of an adapter, whose own files say nothing of its base model's."""
    folder = place / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return folder


def test_records_of_an_adapter_begin_anew_with_another_base(tmp_path):
    base = save(tmp_path / "base")
    settings = EvalSettings(folder=str(adapter(tmp_path, base)), task="lines")
    before = Records(tmp_path, settings).path
    assert Records(tmp_path, settings).path == before
    save(base, seed=1)
    assert Records(tmp_path, settings).path != before


def test_records_of_an_earlier_version_are_not_continued(folder, tmp_path, monkeypatch):
    settings = EvalSettings(folder=str(folder), task="lines")
    before = Records(tmp_path, settings).path
    monkeypatch.setattr("ringspan.evaluate.records.VERSION", 0)
    assert Records(tmp_path, settings).path != before


def test_records_continue_after_a_line_that_was_cut(folder, tmp_path):
    settings = EvalSettings(folder=str(folder), task="lines", items=3)
    records = Records(tmp_path, settings)
    records.load()
    records.add({"key": [1024, None, 0], "score": 1.0})
    with open(records.path, "a") as file:
        file.write('{"key": [1024, None')
    again = Records(tmp_path, settings)
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
        other = Records(tmp_path, EvalSettings(**{"folder": str(folder), "task": "lines", "items": 3, **changes}))
        assert (other.path == records.path) is is_same
    records.path.write_text("what?\n")
    with pytest.raises(ConfigError, match="damaged; delete it"):
        again.load()
