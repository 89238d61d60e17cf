"""Text to sequences: every token is accounted for, every target comes once, and the order is a function of the step."""

import errno
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from ringspan.core.errors import ConfigError
from ringspan.torch.data.padding import IGNORED
from ringspan.train.config.data_table import DataConfig
from ringspan.train.config.load import parse_config
from ringspan.train.config.tables import TrainConfig
from ringspan.train.data import documents as reading
from ringspan.train.data.documents import scan_documents
from ringspan.train.data.sequences import TokenSequences, build_data
from ringspan.train.data.tokens import TokenStream, tokenize, train_tokenizer
from tests.fuzz import examples

PAD = 9_999
TEXT = "The ring passes keys and values on. Größe: 3 µm, naïve 😀\r\n\tdef f(x): return x\n"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Arrow files go to a temporary folder, and no bars are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache")
        )
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


def data_config(*paths: Path | str, **values: Any) -> DataConfig:
    return DataConfig(
        paths=tuple(map(str, paths)), **{"sequence_length_tokens": 8, **values}
    )


def train_config(*paths: Path | str, **values: Any) -> TrainConfig:
    data = {
        "paths": [str(path) for path in paths],
        "sequence_length_tokens": 8,
        **values,
    }
    return parse_config({"model": {"path": "unused"}, "data": data})


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(config: DataConfig) -> list[str]:
    documents = scan_documents(config).documents
    assert documents.column_names == ["text"]
    return list(documents["text"])


def corpus(folder: Path, num_documents: int) -> Path:
    for i in range(num_documents):
        write(
            folder / f"{i:03}.txt", f"{i} " + TEXT[: 11 + 7 * i % 40] + f" end of {i}"
        )
    return folder


def stream_of(lengths: list[int], chunk: int = 3) -> TokenStream:
    """Documents of these lengths; the tokens are 0, 1, 2, ...; an Arrow chunk holds `chunk` documents."""
    ends = np.cumsum(lengths, dtype=int).tolist()
    rows = [
        list(range(end - length, end))
        for end, length in zip(ends, lengths, strict=True)
    ]
    features = Features({"input_ids": List(Value("int32"))})
    groups = [
        Dataset.from_dict({"input_ids": rows[i : i + chunk]}, features)
        for i in range(0, len(rows), chunk)
    ]
    return TokenStream(datasets.concatenate_datasets(groups))


def sequences_of(
    stream: TokenStream,
    documents: str,
    length: int,
    start: int = 0,
    stop: int | None = None,
):
    end = len(stream) if stop is None else stop
    return TokenSequences(
        stream,
        start,
        end,
        sequence_length_tokens=length,
        documents=documents,
        pad_token_id=PAD,
    )


# --- documents ---


def test_folders_are_read_sorted_and_without_hidden_files(tmp_path: Path):
    for name in (
        "b.txt",
        "a/z.md",
        "a/b/c.PY",
        "a.rst",
        "image.png",
        ".git/x.txt",
        ".hidden.txt",
        "b/.venv/y.py",
    ):
        write(tmp_path / name, name)
    assert texts(data_config(tmp_path)) == ["a.rst", "a/b/c.PY", "a/z.md", "b.txt"]
    assert texts(data_config(tmp_path, extensions=(".md",))) == ["a/z.md"]


def test_paths_keep_their_order_and_files_are_read_once(tmp_path: Path):
    write(tmp_path / "a/1.txt", "one")
    odd = write(tmp_path / "notes [1].data", "named by the user, whatever its ending")
    (tmp_path / "a/link.txt").symlink_to(tmp_path / "a/1.txt")
    assert texts(data_config(odd, tmp_path / "a", tmp_path / "a/1.txt")) == [
        "named by the user, whatever its ending",
        "one",
    ]


def test_text_is_kept_as_it_is_but_for_a_byte_order_mark(tmp_path: Path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbf" + TEXT.encode())
    assert texts(data_config(tmp_path)) == [TEXT]


def test_rows_of_json_and_parquet_are_documents(tmp_path: Path):
    write(
        tmp_path / "a.json", json.dumps([{"body": "j0"}, {"body": "j1", "other": [1]}])
    )
    write(
        tmp_path / "b.jsonl",
        '{"body": "l0", "extra": 1}\n\n{"body": "l1", "extra": "of another type"}\n',
    )
    pq.write_table(
        pa.table({"id": [1, 2], "body": ["p0", "p1"]}), tmp_path / "c.parquet"
    )
    write(tmp_path / "d.json", '{"body": "single"}')
    write(tmp_path / "e.txt", "plain")
    assert texts(data_config(tmp_path, text_field="body")) == [
        "j0",
        "j1",
        "l0",
        "l1",
        "p0",
        "p1",
        "single",
        "plain",
    ]


def test_unusable_files_and_rows_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write(tmp_path / "a.txt", b"\xff\xfe\x00broken")
    write(tmp_path / "b.txt", "")
    write(tmp_path / "c.txt", " \n\t")
    write(tmp_path / "d.txt", "good")
    write(
        tmp_path / "e.jsonl", b'{"text": null}\n{"text": "row"}\n{"text": ""}\n\xff\n'
    )
    config = data_config(tmp_path)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="ringspan"):
            scan = scan_documents(config)
        assert list(scan.documents["text"]) == ["good", "row"]
        assert (scan.num_undecodable, scan.num_empty) == (3, 3)
        assert caplog.messages == [
            "skipped 6 of 8 documents, which have no text: 3 not UTF-8 or null, 3 empty"
        ]


def test_non_files_are_skipped_in_folders_and_refused_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write(tmp_path / "a.txt", "one")
    (tmp_path / "nothing.txt").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.txt")
    with caplog.at_level(logging.WARNING, logger="ringspan"):
        assert texts(data_config(tmp_path)) == ["one"]
    assert caplog.messages == [
        f"{tmp_path}: left out 2 links to nothing, pipes and the like"
    ]
    with pytest.raises(
        ConfigError, match=r"pipe.txt\": is no file that can be read twice"
    ):
        scan_documents(data_config(tmp_path / "pipe.txt"))


def test_what_cannot_be_looked_at_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(
        ConfigError, match=r'xxx": cannot be read: .*File name too long'
    ):
        scan_documents(data_config("x" * 300))
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "closed/b.txt", "two")
    look = os.scandir

    def scandir(path: Any) -> Any:  # root may look into everything
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(
        ConfigError, match=r"cannot be read: .*Permission denied.*closed"
    ):
        scan_documents(data_config(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "a.txt", "some text")
    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", tmp_path / "a.txt" / "cache"
    )
    with pytest.raises(
        ConfigError,
        match=r"a\.txt/cache: text cannot be cached there .*a\.txt is a file.; set HF_HOME",
    ):
        scan_documents(data_config(tmp_path / "a.txt"))
    monkeypatch.undo()

    def full(*args: Any, **kwargs: Any) -> Dataset:
        raise DatasetGenerationError from OSError(
            errno.ENOSPC, "No space left on device"
        )

    monkeypatch.setattr(Dataset, "from_generator", full)
    with pytest.raises(
        ConfigError,
        match=r"text cannot be cached there .No space left on device.; make room",
    ):
        scan_documents(data_config(tmp_path / "a.txt"))


def test_a_changed_file_is_read_again(tmp_path: Path):
    file = write(tmp_path / "a.txt", "before")
    assert texts(data_config(tmp_path)) == ["before"]
    stamp = file.stat().st_mtime_ns
    write(file, "after!")  # of the same size
    os.utime(file, ns=(stamp, stamp + 1))
    assert texts(data_config(tmp_path)) == ["after!"]


def test_a_file_that_changes_while_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "a.txt", "whole")
    plain = reading._read_text

    def while_somebody_writes(path: Path, text_field: str) -> Iterator[str | None]:
        yield from plain(path, text_field)
        path.write_text("who")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "_read_text", while_somebody_writes)
        with pytest.raises(
            ConfigError, match=r'a\.txt": changed while it was read; start again'
        ) as caught:
            texts(data_config(tmp_path))
    assert "\n" not in str(caught.value)
    assert texts(data_config(tmp_path)) == ["who"]


@pytest.mark.parametrize(
    "kind", [Value("string"), Value("large_string")], ids=lambda kind: kind.dtype
)
def test_a_hub_dataset_is_reduced_to_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Value
):
    calls = []

    def load(*args: Any, **kwargs: Any) -> Dataset:
        calls.append((args, kwargs))
        return Dataset.from_dict(
            {"id": [1, 2], "body": ["h0", "h1"]},
            Features({"id": Value("int64"), "body": kind}),
        )

    monkeypatch.setattr("ringspan.plan.model.hub.out_of_reach", lambda: None)
    monkeypatch.setattr("ringspan.train.data.documents.load_dataset", load)
    write(tmp_path / "a.jsonl", '{"body": "local"}')
    config = data_config(
        "hub:who/what:en", tmp_path, text_field="body", hub_split="train[:2]"
    )
    assert texts(config) == ["local", "h0", "h1"]
    assert calls == [(("who/what", "en"), {"split": "train[:2]"})]


def refuse_hub(*_: Any, **__: Any) -> Dataset:
    raise ConnectionError("no route\nto host")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}', "a.jsonl:2; its fields are txt"),
        (
            "a.jsonl",
            '{"text": 3}',
            'data.text_field = "text": is int, not a string, in',
        ),
        ("a.jsonl", '{"text": "x"', 'a.jsonl:1": is not valid JSON'),
        ("a.jsonl", "[" * 100_000, 'a.jsonl": cannot be read: '),
        ("a.jsonl", "[1]", "a.jsonl:1; it has no fields"),
        ("a.json", '[{"body": "x"}]', 'data.text_field = "text": is missing in'),
        (
            "a.json",
            '{"text": "x"}\n{"text": 1',
            'a.json:2": is no line of JSON, and the file is not one JSON value',
        ),
        ("a.parquet", "no parquet", "cannot be read"),
        (
            "a.txt",
            "  ",
            "no text in 1 documents (0 not UTF-8 or null, 1 empty); add files with text",
        ),
        (
            "a.jsonl",
            "\n",
            "no text in 1 documents (0 not UTF-8 or null, 1 empty); add files with text",
        ),
        (
            "a.json",
            "[]",
            "no text in 1 documents (0 not UTF-8 or null, 1 empty); add files with text",
        ),
        (
            "a.png",
            "x",
            "no file in it ends in .txt, .md, .rst, .py, .jsonl, .json, .parquet; correct it",
        ),
    ],
)
def test_unusable_data_is_refused_in_one_line(
    tmp_path: Path, name: str, content: str, message: str
):
    write(tmp_path / name, content)
    with pytest.raises(ConfigError) as caught:
        scan_documents(data_config(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_path_textless_parquet_and_hub_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(
        ConfigError,
        match=r'data.paths = "nowhere": does not exist in .*; correct it, or write "hub:',
    ):
        scan_documents(data_config("nowhere"))
    pq.write_table(pa.table({"id": [1]}), tmp_path / "c.parquet")
    with pytest.raises(
        ConfigError,
        match=r'data.text_field = "text": is missing in .*c\.parquet; its fields are id',
    ):
        scan_documents(data_config(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r'"id": is int64, not a string, in .*c\.parquet; name another field',
    ):
        scan_documents(data_config(tmp_path, text_field="id"))
    monkeypatch.setattr("ringspan.plan.model.hub.out_of_reach", lambda: None)
    monkeypatch.setattr("ringspan.train.data.documents.load_dataset", refuse_hub)
    with pytest.raises(
        ConfigError,
        match=r'data.paths = "hub:a/b": cannot be loaded: no route to host; check its name',
    ):
        scan_documents(data_config("hub:a/b"))


def test_a_text_too_long_for_arrow_is_refused_before_reading(tmp_path: Path):
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(1 << 31)  # sparse
    with pytest.raises(
        ConfigError,
        match=r"huge\.txt\": is larger than 2 GiB; split it, or make it a \.jsonl file",
    ):
        scan_documents(data_config(tmp_path))


# --- tokens ---


def test_a_trained_tokenizer_round_trips_and_is_deterministic():
    documents = Dataset.from_dict({"text": [TEXT * 3, "ring " * 20, "keys and values"]})
    tokenizer = train_tokenizer(documents, 300)
    assert len(tokenizer) == 300
    assert (
        tokenizer.backend_tokenizer.to_str()
        == train_tokenizer(documents, 300).backend_tokenizer.to_str()
    )
    unseen = "Ünseen – ∑ 漢字 \x00\r\n  two  spaces ."
    assert tokenizer.decode(tokenizer(unseen)["input_ids"]) == unseen
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        "<|endoftext|>",
        0,
        0,
    )


def test_each_document_ends_with_end_of_text_once():
    documents = Dataset.from_dict({"text": ["ab", "cd<|endoftext|>", "e"]})
    tokenizer = train_tokenizer(documents, 257)
    rows = list(tokenize(documents, tokenizer)["input_ids"])
    assert [tokenizer.decode(row) for row in rows] == [
        "ab<|endoftext|>",
        "cd<|endoftext|>",
        "e<|endoftext|>",
    ]
    assert [len(row) for row in rows] == [3, 3, 2]


def test_a_tokenizer_keeps_its_special_tokens():
    documents = Dataset.from_dict({"text": ["ab", "c"]})
    tokenizer = train_tokenizer(documents, 257)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    tokenizer.eos_token = None
    rows = list(tokenize(documents, tokenizer)["input_ids"])
    assert [len(row) for row in rows] == [3, 2]
    assert all(row[0] == start and 0 not in row for row in rows)


def test_tokens_are_cached_for_a_used_or_new_tokenizer(tmp_path: Path):
    corpus(tmp_path, 3)
    documents = scan_documents(data_config(tmp_path)).documents
    fresh, used = train_tokenizer(documents, 260), train_tokenizer(documents, 260)
    used.model_max_length = 2
    used(["x", "yy"], padding=True, truncation=True, max_length=2)
    first = tokenize(documents, fresh)
    second = tokenize(documents, used)
    assert first.cache_files and first.cache_files == second.cache_files
    other = tokenize(documents, train_tokenizer(documents, 261))
    assert other.cache_files != first.cache_files


def test_a_document_beyond_model_max_length_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    # a run that another test made may have silenced it
    caplog.set_level(logging.WARNING, logger="transformers")
    documents = Dataset.from_dict({"text": [TEXT]})
    tokenizer = train_tokenizer(documents, 257)
    tokenizer.model_max_length = 4
    rows = list(tokenize(documents, tokenizer)["input_ids"])
    assert [len(row) for row in rows] == [len(TEXT.encode()) + 1]
    assert caplog.messages == []
    tokenizer(TEXT)  # the warning exists, and would have been seen
    assert "longer than the specified maximum" in caplog.text


# Documents without tokens too: a tokenizer without an end-of-text token can yield them.
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)


def part_of(stream: TokenStream, data: st.DataObject) -> tuple[int, int]:
    """The bounds of some part of a stream, which may be empty."""
    start = data.draw(st.integers(0, len(stream)))
    return start, data.draw(st.integers(start, len(stream)))


@given(LENGTHS, st.data())
@examples(30)
def test_a_stream_is_the_documents_one_after_the_other(
    lengths: list[int], data: st.DataObject
):
    stream = stream_of(lengths, chunk=data.draw(st.integers(1, 4)))
    assert (len(stream), stream.num_documents) == (sum(lengths), len(lengths))
    assert np.diff(stream.document_starts).tolist() == lengths
    start, stop = part_of(stream, data)
    found = stream.read(start, stop)
    assert found.dtype == np.int64
    assert found.tolist() == list(range(start, stop))


# --- sequences ---


@given(LENGTHS, st.integers(2, 9), st.data())
@examples(30)
def test_packed_windows_predict_each_token_once(
    lengths: list[int], length: int, data: st.DataObject
):
    stream = stream_of(lengths)
    start, stop = part_of(stream, data)
    found = sequences_of(stream, "pack", length, start, stop)
    assert len(found) == max(0, stop - start - 1) // length
    inputs = [token for sequence in found for token in sequence["input_ids"].tolist()]
    targets = [
        token for sequence in found for token in sequence["shift_labels"].tolist()
    ]
    assert inputs == list(range(start, start + len(found) * length))
    assert targets == [token + 1 for token in inputs]
    assert found.num_dropped_tokens == stop - start - (len(inputs) + 1 if inputs else 0)


@given(LENGTHS, st.integers(2, 9), st.data())
@examples(30)
def test_cut_windows_stay_in_their_document_and_pad_its_end(
    lengths: list[int], length: int, data: st.DataObject
):
    stream = stream_of(lengths)
    start, stop = part_of(stream, data)
    found = sequences_of(stream, "cut", length, start, stop)
    document = np.repeat(np.arange(len(lengths)), lengths)
    inputs, targets = [], []
    for sequence in found:
        tokens, labels = sequence["input_ids"], sequence["shift_labels"]
        assert tokens.shape == labels.shape == (length,)
        assert tokens.dtype == labels.dtype == np.int64
        kept = tokens != PAD
        assert not np.any(np.diff(kept.astype(int)) > 0), "padding is on the right only"
        assert np.all(labels[~kept] == IGNORED)
        valid = labels != IGNORED
        assert valid.any()
        assert np.array_equal(labels[valid], tokens[valid] + 1)
        assert len(set(document[tokens[kept]]) | set(document[labels[valid]])) == 1
        inputs += tokens[kept].tolist()
        targets += labels[valid].tolist()
    # Every token of the part that follows another one of its document is a target, once.
    assert targets == [
        p for p in range(start + 1, stop) if document[p] == document[p - 1]
    ]
    assert len(set(inputs)) == len(inputs)
    assert found.num_dropped_tokens == stop - start - len(set(inputs) | set(targets))


@given(LENGTHS, st.integers(2, 9), st.data())
def test_separate_documents_use_packed_windows(
    lengths: list[int], length: int, data: st.DataObject
):
    stream = stream_of(lengths)
    start, stop = part_of(stream, data)
    packed, found = (
        sequences_of(stream, documents, length, start, stop)
        for documents in ("pack", "separate")
    )
    assert (
        len(found) == len(packed)
        and found.num_dropped_tokens == packed.num_dropped_tokens
    )
    document, seen = np.repeat(np.arange(len(lengths)), lengths), 0
    for one, other in zip(found, packed, strict=True):
        tokens, labels, positions = (
            one["input_ids"],
            one["shift_labels"],
            one["position_ids"],
        )
        assert np.array_equal(tokens, other["input_ids"])
        assert (
            positions.shape == (length,) and positions.dtype == labels.dtype == np.int64
        )
        follows = document[other["shift_labels"]] == document[tokens]
        assert np.array_equal(labels, np.where(follows, other["shift_labels"], IGNORED))
        same = document[tokens][:, None] == document[tokens]
        assert np.array_equal(positions, np.tril(same, -1).sum(1)), (
            "as many as are before it in its document"
        )
        seen += same.sum()
    if len(found):
        assert found.seen_tokens == pytest.approx(seen / (length * len(found)))
        assert packed.seen_tokens == length


def test_an_index_counts_from_either_end_and_stays_inside():
    found = sequences_of(stream_of([20]), "pack", 4)
    assert len(found) == 4
    assert (
        found[-1]["input_ids"].tolist()
        == found[np.int64(3)]["input_ids"].tolist()
        == [12, 13, 14, 15]
    )
    for outside in (4, -5):
        with pytest.raises(IndexError, match=f"sequence {outside} of 4"):
            found[outside]


# --- train and eval ---


def whole_stream(config: TrainConfig, tokenizer: Any) -> list[int]:
    return [
        token
        for row in tokenize(scan_documents(config.data).documents, tokenizer)[
            "input_ids"
        ]
        for token in row
    ]


@pytest.mark.parametrize("documents", ["pack", "separate", "cut"])
@pytest.mark.parametrize("num_documents", [3, 30])
def test_train_and_eval_share_no_token_and_leave_none_out(
    tmp_path: Path, documents: str, num_documents: int
):
    config = train_config(
        corpus(tmp_path, num_documents), documents=documents, eval_fraction=0.1
    )
    tokenizer = train_tokenizer(scan_documents(config.data).documents, 257)
    data = build_data(config, tokenizer)
    assert data.eval is not None and len(data.eval) > 0
    stream = whole_stream(config, tokenizer)
    assert (
        data.num_tokens == len(stream) == data.train.num_tokens + data.eval.num_tokens
    )
    assert data.num_documents == num_documents
    assert (
        data.num_dropped_tokens
        == data.train.num_dropped_tokens + data.eval.num_dropped_tokens
    )
    if documents != "cut":
        for part, tokens in (
            (data.train, stream[: data.train.num_tokens]),
            (data.eval, stream[data.train.num_tokens :]),
        ):
            covered = len(part) * 8
            assert [t for s in part for t in s["input_ids"].tolist()] == tokens[
                :covered
            ]
            targets = [t for s in part for t in s["shift_labels"].tolist()]
            ends = tokenizer.eos_token_id if documents == "separate" else None
            neighbours = itertools.pairwise(tokens[: covered + 1])
            assert targets == [
                IGNORED if token == ends else target for token, target in neighbours
            ]
    if num_documents == 30:
        rows = [
            len(row)
            for row in tokenize(scan_documents(config.data).documents, tokenizer)[
                "input_ids"
            ]
        ]
        assert data.eval.num_tokens == sum(rows[-3:])
    elif documents != "cut":
        assert len(data.eval) == int(np.ceil(0.1 * ((len(stream) - 1) // 8)))
        assert data.eval.num_dropped_tokens == 0


def test_eval_takes_more_documents_if_the_last_are_too_short(tmp_path: Path):
    for i in range(40):
        write(tmp_path / f"{i:02}.txt", "abc")  # 4 tokens each
    config = train_config(tmp_path, sequence_length_tokens=10, eval_fraction=0.01)
    data = build_data(
        config, train_tokenizer(scan_documents(config.data).documents, 257)
    )
    assert data.eval is not None
    assert (data.eval.num_tokens, len(data.eval)) == (12, 1)
    assert len(data.train) == 14


def test_too_little_text_names_the_tokens_found_and_needed(tmp_path: Path):
    file = write(tmp_path / "a.txt", "x" * 16)
    tokenizer = train_tokenizer(scan_documents(data_config(file)).documents, 257)
    with pytest.raises(ConfigError) as caught:
        build_data(
            train_config(file, sequence_length_tokens=17, eval_fraction=0), tokenizer
        )
    assert str(caught.value) == (
        "data.sequence_length_tokens = 17: needs 18 tokens to train on, but there are 17 in 1 documents; "
        "add text, shorten the sequence or hold out less"
    )
    with pytest.raises(
        ConfigError,
        match=r"needs 9 tokens to train on and 9 to hold out \(data.eval_fraction = 0.02\)",
    ):
        build_data(train_config(file, eval_fraction=0.02), tokenizer)


def test_a_default_accepts_a_text_long_enough_to_train_on(tmp_path: Path, caplog):
    file = write(tmp_path / "a.txt", "x" * 16)
    tokenizer = train_tokenizer(scan_documents(data_config(file)).documents, 257)
    data = build_data(train_config(file), tokenizer)
    assert data.eval is None and len(data.train) == 2
    assert "17 tokens are too few to hold some out" in caplog.text


def test_lines_of_json_are_read_under_a_name_of_json(tmp_path: Path):
    write(tmp_path / "a.json", '{"text": "one\u2028two"}\r\n\n{"text": "three"}\n')
    assert scan_documents(data_config(tmp_path)).documents["text"][:] == [
        "one\u2028two",
        "three",
    ]
