"""Files, folders, Hub data sets -> documents, one memory-mapped row each."""

import errno
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets import config as caches
from datasets.exceptions import DatasetGenerationError

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import why_no_folder
from ringspan.core.messages.lines import few, one_line, refused
from ringspan.plan.model.hub import from_hub
from ringspan.train.config.data_table import DataConfig, find_files

logger = logging.getLogger(__name__)
# Part of each cache key: raise it when the same files would give other documents.
_CACHE_VERSION = 1
_BATCH_BYTES = 8 << 20
NOT_UTF8: Final = object()  # in place of a row


@dataclass(frozen=True, kw_only=True)
class DocumentScan:
    documents: Dataset  # one column, "text"; one row per document
    # files and .jsonl lines that are not UTF-8, and rows with null text
    num_undecodable: int
    num_empty: int  # files and rows with only white space
    files: dict[str, tuple[int, int]]  # local files -> (size, modification time)


def scan_documents(config: DataConfig) -> DocumentScan:
    """Read the documents in order: one per JSON object, .parquet row or other file; skip and count unusable texts."""
    cache = Path(caches.HF_DATASETS_CACHE)
    if reason := why_no_folder(cache):
        raise ConfigError(
            f"{cache}: text cannot be cached there ({reason}); set HF_HOME to a folder with room"
        )
    local = [path for path in config.paths if not path.startswith("hub:")]
    found = find_files(config)
    for line in found.left_out:
        logger.warning(line)
    files = found.files
    parts = [_load_files(files, config.text_field)] if local else []
    parts += [
        _load_hub(path, config) for path in config.paths if path.startswith("hub:")
    ]
    rows = concatenate_datasets(parts)
    documents = rows.filter(
        _has_text, input_columns="text", batched=True, batch_size=rows_per_batch(rows)
    )
    num_undecodable = column_of(rows, "text").null_count
    num_empty = len(rows) - len(documents) - num_undecodable
    if num_undecodable or num_empty:
        logger.warning(
            "skipped %d of %d documents, which have no text: %d not UTF-8 or null, %d empty",
            num_undecodable + num_empty,
            len(rows),
            num_undecodable,
            num_empty,
        )
    if not len(documents):
        raise ConfigError(
            f"data.paths = {few(config.paths)}: no text in {len(rows)} documents ({num_undecodable} not UTF-8 or "
            f"null, {num_empty} empty); add files with text"
        )
    # Sizes and times, by which a later run sees that text has changed without reading it.
    stamps = {
        str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files
    }
    return DocumentScan(
        documents=documents,
        num_undecodable=num_undecodable,
        num_empty=num_empty,
        files=stamps,
    )


def _load_files(files: Sequence[Path], text_field: str) -> Dataset:
    """Return a data set with a text per document of local files, read once and then memory-mapped from a cache.

    The cache is keyed by the names, sizes and modification times of the files.
    """
    # A changed file has another size or time, and so another cache key. datasets would split a list into shards.
    stamps = tuple(
        (str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
    )
    try:
        return Dataset.from_generator(
            _read_files,
            features=Features({"text": Value("string")}),
            gen_kwargs={
                "stamps": stamps,
                "text_field": text_field,
                "version": _CACHE_VERSION,
            },
            writer_batch_size=64,  # rows held in memory, each up to a whole file
        )
    except DatasetGenerationError as error:
        cause: BaseException = error
        # datasets wraps the generator's error, maybe more than once.
        while cause.__cause__ is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        if isinstance(cause, OSError) and cause.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
        ):
            cache = caches.HF_DATASETS_CACHE
            raise ConfigError(
                f"{cache}: text cannot be cached there ({cause.strerror}); make room, or set HF_HOME"
            ) from error
        raise ConfigError(
            f"data.paths: reading failed: {one_line(cause)}; repair or remove the file"
        ) from error


def _read_files(
    stamps: Sequence[tuple[str, int, int]], text_field: str, version: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each document of the files; raise ConfigError if a file is malformed or changes meanwhile."""
    for name, *stamp in stamps:
        path = Path(name)
        read = _READERS.get(path.suffix.lower(), _read_text)
        where, kinds = (
            f'data.paths = "{path}"',
            (OSError, pa.ArrowException, ValueError, RecursionError),
        )
        with refused(
            f"{where}: cannot be read", *kinds, remedy="; repair or remove it"
        ):
            num_rows = 0
            for text in read(path, text_field):
                num_rows += 1
                yield {"text": text}
            if not num_rows:
                yield {"text": ""}  # so that a file without rows is counted as empty
            # A changed text would be cached under the old stamp.
            if stamp != [
                path.stat().st_size,
                path.stat().st_mtime_ns,
            ]:
                raise ConfigError(
                    f"{where}: changed while it was read; start again when it is complete"
                )


def _read_text(path: Path, text_field: str) -> Iterator[str | None]:
    yield _decoded(path.read_bytes())


def _read_json(path: Path, text_field: str) -> Iterator[str | None]:
    for place, row in json_rows(path):
        yield None if row is NOT_UTF8 else _field_of(row, text_field, place)


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each JSON value of a file with its place: an element of a .json list, or a line of .jsonl.

    A line that is not UTF-8 is NOT_UTF8. A .json file with several values is read as JSON lines.
    """
    is_whole = path.suffix.lower() == ".json"
    with path.open("rb") as file:
        for number, line in enumerate([file.read()] if is_whole else file, start=1):
            place = str(path) if is_whole else f"{path}:{number}"
            text = _decoded(line)
            if text is None:
                yield place, NOT_UTF8
            elif text.strip():  # a last line break is no document
                with refused(
                    f'data.paths = "{place}": is not valid JSON',
                    ValueError,
                    remedy="; repair or remove it",
                ):
                    try:
                        row = json.loads(text)
                    except json.JSONDecodeError as error:
                        if not is_whole or error.msg != "Extra data":
                            raise
                        # JSON lines in a file named .json.
                        yield from _lines_of(text, path)
                        continue
                if is_whole and isinstance(row, list):
                    yield from (
                        (f"{path}[{index}]", each) for index, each in enumerate(row)
                    )
                else:
                    yield (f"{path}[0]" if is_whole else place), row


def _lines_of(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines, which ends a line at characters that JSON may hold in a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f'data.paths = "{path}:{number}": is no line of JSON, and the file is not one JSON value'
            with refused(where, ValueError, remedy="; repair it"):
                row = json.loads(line)
            yield f"{path}:{number}", row


def _read_parquet(path: Path, text_field: str) -> Iterator[str | None]:
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise _no_field(str(path), text_field, columns)
        kind = file.schema_arrow.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(
                f'data.text_field = "{text_field}": is {kind}, not a string, in {path}; name another field'
            )
        # Rows may be whole books: a few at a time.
        for batch in file.iter_batches(batch_size=64, columns=[text_field]):
            yield from batch.column(0).to_pylist()


_READERS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError:
        return None


def _field_of(row: object, text_field: str, place: str) -> str | None:
    if not isinstance(row, dict) or text_field not in row:
        raise _no_field(place, text_field, list(row) if isinstance(row, dict) else [])
    text = row[text_field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f'data.text_field = "{text_field}": is {type(text).__name__}, not a string, in {place}; name another field'
        )
    try:
        (text or "").encode()
    # JSON can spell half of a surrogate pair, and UTF-8 cannot.
    except UnicodeEncodeError:
        return None
    return text


def _no_field(place: str, text_field: str, fields: Sequence[str]) -> ConfigError:
    known = f"its fields are {few(fields)}" if fields else "it has no fields"
    return ConfigError(
        f'data.text_field = "{text_field}": is missing in {place}; {known}'
    )


def _load_hub(path: str, config: DataConfig) -> Dataset:
    """Return a Hub data set's texts as a data set with the column "text", as strings with 32-bit offsets."""
    name, _, configuration = path.removeprefix("hub:").partition(":")
    where = f'data.paths = "{path}"'
    # The errors have no common base: network, permission, missing split, malformed files.
    with (
        refused(f"{where}: cannot be loaded", Exception, remedy="; check its name"),
        from_hub(where, name),
    ):
        dataset = load_dataset(name, configuration or None, split=config.hub_split)
    field = config.text_field
    if field not in dataset.column_names:
        raise _no_field(path, field, dataset.column_names)
    if dataset.features[field] not in (Value("string"), Value("large_string")):
        raise ConfigError(
            f'data.text_field = "{field}": is {dataset.features[field]}, not a string, in {path}; name another field'
        )
    dataset = dataset.select_columns([field])
    if field != "text":
        dataset = dataset.rename_column(field, "text")
    # A cast rewrites all rows, so it is done only if concatenation needs it.
    return (
        dataset
        if dataset.features["text"] == Value("string")
        else dataset.cast_column("text", Value("string"))
    )


def _has_text(texts: Sequence[str | None]) -> list[bool]:
    return [text is not None and not text.isspace() and text != "" for text in texts]


def rows_per_batch(documents: Dataset) -> int:
    """Return the number of rows that hold about 8 MiB of text, at most 1000, and at least one."""
    return max(
        1,
        min(1000, _BATCH_BYTES * len(documents.data) // max(1, documents.data.nbytes)),
    )


def column_of(dataset: Dataset, name: str) -> pa.ChunkedArray:
    table: Any = dataset.with_format("arrow")[:]
    return table.column(name)
