"""Conversations in .json and .jsonl files: lists of messages in which images, videos and sound are paths.

{"messages": [{"role": "user", "content": [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What?"}]},
              {"role": "assistant", "content": "A cat."}]}
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import few, refused
from ringspan.train.config.data_table import CONVERSATIONS, DataConfig, find_files
from ringspan.train.data.documents import NOT_UTF8, json_rows

# Types of a message's parts in addition to text, and the keys that transformers' processors read their path from.
MEDIA: Final = ("image", "video", "audio")
_KEYS: Final = ("path", "url")  # other names for the path of each of them
# Keys of a row in addition to its messages.
_LISTS: Final = ("tools", "documents")
_VARIABLES: Final = "chat_template_kwargs"
# Keys that only name a row or its origin: nothing in them could be trained on.
_LABELS: Final = frozenset(
    {
        "category",
        "conversation_id",
        "created_at",
        "dataset",
        "date",
        "hash",
        "id",
        "idx",
        "index",
        "language",
        "license",
        "origin",
        "source",
        "timestamp",
        "topic",
        "uid",
        "url",
        "uuid",
    }
)


@dataclass(frozen=True)
class Example:
    messages: list[dict[str, Any]]
    """Contents are lists of parts; paths are absolute, a list of them for the frames of a video. Next to tool calls, a
    content may be None or missing."""
    place: str
    beside: dict[str, Any] = field(default_factory=dict[str, Any])
    """Tools and documents, for the chat template."""
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other variables of the chat template."""
    untrained: tuple[int, ...] = ()
    """Indices of messages whose tokens are not targets."""

    @property
    def media(self) -> list[Path]:
        parts = (
            part for message in self.messages for part in message.get("content") or ()
        )
        return [
            Path(name)
            for part in parts
            if part["type"] in MEDIA
            for name in _names(part[part["type"]])
        ]


@dataclass(frozen=True)
class Conversations:
    examples: list[Example]
    files: dict[str, tuple[int, int]] = field(
        default_factory=dict[str, tuple[int, int]]
    )
    """Conversation files -> (size, modification time)."""

    def digest(self) -> str:
        digest = hashlib.sha256()
        for example in self.examples:
            stamps = [
                (path.stat().st_size, path.stat().st_mtime_ns) for path in example.media
            ]
            more = [
                each
                for each in (example.beside, example.variables, example.untrained)
                if each
            ]
            digest.update(
                json.dumps([example.messages, stamps, *more], sort_keys=True).encode()
            )
        return digest.hexdigest()


def read_conversations(config: DataConfig) -> Conversations:
    """Read the conversations of all local .jsonl and .json files, one per row.

    Raise ConfigError at a bad one's line.
    """
    field_ = config.messages
    assert field_ is not None, "asked by the caller"
    for path in config.paths:
        if path.startswith("hub:"):
            raise ConfigError(
                f'data.paths = "{path}": conversations (data.messages) are read from local files'
            )
    found = find_files(config)
    examples: list[Example] = []
    for file in found.files:
        if file.suffix.lower() not in CONVERSATIONS:
            raise ConfigError(
                f'data.paths = "{file}": conversations (data.messages) are read from .jsonl and .json'
            )
        examples += [
            _example(row, field_, place, file.parent) for place, row in _rows(file)
        ]
    if not examples:
        raise ConfigError(
            f"data.messages = {field_!r}: no conversation in {', '.join(config.paths)}; add some"
        )
    stamps = {
        str(file): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in found.files
    }
    return Conversations(examples, stamps)


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    where = f'data.paths = "{file}": cannot be read'
    with refused(where, OSError, ValueError, RecursionError, remedy="; repair it"):
        for place, row in json_rows(file):
            if row is NOT_UTF8:
                raise ConfigError(
                    f'data.paths = "{place}": is not UTF-8 text; repair it'
                )
            yield place, row


def _example(row: object, name: str, place: str, folder: Path) -> Example:
    """Convert a row of a file to an example.

    ``name`` is the field with its messages, ``folder`` the base of its paths.
    """
    messages = row.get(name) if isinstance(row, dict) else None
    if not isinstance(row, dict) or not _is_list(messages) or not messages:
        raise ConfigError(
            f"data.messages = {name!r}: {place} has no list of messages there; name another field"
        )
    beside, variables = _beside(row, name, place)
    made = [_message(message, place, folder) for message in messages]
    untrained = tuple(
        number for number, message in enumerate(made) if not _is_trained(message, place)
    )
    return Example(made, place, beside, variables, untrained)


def _beside(
    row: dict[str, Any], name: str, place: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tools and documents, template variables) of a row, in the form of TRL's data sets."""
    given = {
        key: _without_nones(value)
        for key, value in row.items()
        if key != name and key not in _LABELS and value is not None
    }
    if unknown := sorted(given.keys() - {*_LISTS, _VARIABLES}):
        raise ConfigError(
            f"{place}: has {few(unknown)} beside {name}, which training does not read; take it out of the row, or "
            f"put variables of the chat template into {_VARIABLES}"
        )
    variables = given.pop(_VARIABLES, {})
    if not isinstance(variables, dict):
        raise ConfigError(
            f"{place}: {_VARIABLES} must be an object, got {json.dumps(variables)[:80]}"
        )
    # TRL's data sets may have tools as JSON text, since their schemas differ from row to row.
    for key, value in given.items():
        if key == "tools" and isinstance(value, str):
            with refused(
                f"{place}: tools is no JSON", ValueError, remedy="; correct it"
            ):
                value = given[key] = json.loads(value)
        if not _is_list(value) or not all(isinstance(each, dict) for each in value):
            raise ConfigError(
                f"{place}: {key} must be a list of objects, got {json.dumps(value)[:80]}"
            )
    # Templates that ask only whether there is a list would write an empty one.
    return {key: value for key, value in given.items() if value}, variables


def _message(message: Any, place: str, folder: Path) -> dict[str, Any]:
    """Convert a message to the form of transformers' processors: content as a list of parts, with absolute paths."""
    given = _without_nones(message)
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ConfigError(
            f"{place}: a message needs a role and content, got {json.dumps(message)[:80]}"
        )
    content = given.pop("content", None)
    if not given.get("tool_calls", True):
        del given["tool_calls"]  # an empty list
    if content is None:
        if "tool_calls" not in given:
            raise ConfigError(
                f"{place}: a message needs a role and content, or tool_calls, got {json.dumps(message)[:80]}"
            )
        # Templates may tell a content of None from a missing one.
        return given | ({"content": None} if "content" in message else {})
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not _is_list(parts):
        raise ConfigError(
            f"{place}: content must be text or a list of parts, got {type(content).__name__}"
        )
    return given | {"content": [_part(part, place, folder) for part in parts]}


def _is_trained(message: dict[str, Any], place: str) -> bool:
    """Pop the keys ``weight`` (0 or 1) and ``train`` of a message; return whether its tokens are targets."""
    weight, train = message.pop("weight", 1), message.pop("train", True)
    if weight not in (0, 1):
        raise ConfigError(
            f"{place}: weight = {json.dumps(weight)[:80]} of a message: must be 0 or 1; set it to one"
        )
    if not isinstance(train, bool):
        raise ConfigError(
            f"{place}: train = {json.dumps(train)[:80]} of a message: must be true or false; set it"
        )
    return bool(weight) and train


def _without_nones(value: Any) -> Any:
    """Drop keys without a value at any depth, because rows of a table have the keys of all rows."""
    if isinstance(value, dict):
        return {
            key: _without_nones(each) for key, each in value.items() if each is not None
        }
    return (
        [_without_nones(each) for each in value] if isinstance(value, list) else value
    )


def _part(part: Any, place: str, folder: Path) -> dict[str, Any]:
    """Convert a message's part to the processors' form: its absolute path under its type."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise ConfigError(
                f"{place}: a part of text has {few(unknown)}, which nothing reads; leave it out"
            )
        return part
    if kind not in MEDIA:
        raise ConfigError(
            f"{place}: a part must be text, image, video or audio, got {json.dumps(part)[:80]}"
        )
    given = {key: value for key, value in part.items() if key != "type"}
    if unknown := sorted(given.keys() - {kind, *_KEYS}):
        raise ConfigError(
            f"{place}: its {kind} has {', '.join(unknown)}, which processors do not read there; leave it out, or set "
            "it in their own files"
        )
    paths = next(iter(given.values()), None)
    names = _names(paths)
    if len(given) != 1 or not names or (len(names) > 1 and kind != "video"):
        raise ConfigError(
            f"{place}: its {kind} needs one path{', or a list of frames' * (kind == 'video')}, got "
            f"{json.dumps(given)[:80]}"
        )
    return {"type": kind, kind: _resolved(paths, kind, place, folder)}


def _resolved(given: object, kind: str, place: str, folder: Path) -> object:
    paths: list[str] = []
    for name in _names(given):
        if "://" in name:
            raise ConfigError(
                f"{place}: {kind} {name!r} is an address of the network; download it, and give its path"
            )
        path = (folder / Path(name).expanduser()).absolute()
        if not path.is_file():
            raise ConfigError(
                f"{place}: {kind} {name!r} is no file; correct its path, which counts from {folder}"
            )
        paths.append(str(path))
    return paths[0] if isinstance(given, str) else paths


def _names(given: Any) -> list[str]:
    names = [given] if isinstance(given, str) else given
    return (
        list(names)
        if _is_list(names) and all(isinstance(name, str) for name in names)
        else []
    )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | Mapping)
