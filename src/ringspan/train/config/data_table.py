"""Table [data], and its files, found without importing a framework."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import few, refused
from ringspan.core.names import BalanceName
from ringspan.train.config.problems import Strings, Table

CONVERSATIONS: Final = (".jsonl", ".json")
"""Endings of files with conversations."""
DocumentsName = Literal["pack", "separate", "cut"]


class DataConfig(Table):
    """[data]: the text, and how to turn it into sequences of one length."""

    paths: Strings = Field(strict=False, min_length=1, examples=[["data"]])
    """Files, folders (searched recursively, hidden entries left out) and "hub:<dataset id>[:<configuration>]"."""
    text_field: str = "text"
    """The field with the text in .json, .jsonl and .parquet files and in Hub datasets."""
    messages: str | None = Field(default=None, examples=["messages"])
    """The field with a conversation, a list of messages with role and content, in .json and .jsonl files, instead of
    text_field. Contents may have parts of type "image", "video" and "audio" with a path relative to their file (a video
    also a list of frames). The model's processor turns each conversation into a sequence. For tools and
    other keys see docs/multimodal.md."""
    shared_prefix: bool = False
    """Compute once what the conversations of a micro-step begin with alike, such as a system prompt or earlier turns;
    for messages of text. The loss stays the same."""
    min_shared_tokens: int = Field(default=64, ge=1)
    """The shortest beginning that conversations share."""
    hub_split: str = "train"
    """Split of the Hub datasets; slices such as "train[:1%]" work."""
    extensions: tuple[str, ...] = Field(
        default=(".txt", ".md", ".rst", ".py", ".jsonl", ".json", ".parquet"),
        strict=False,
        min_length=1,
    )
    """Endings of files to read in folders. A file named in paths is always read."""
    sequence_length_tokens: int = Field(ge=2, examples=[32768])
    """Tokens of one training sequence, over the whole ring."""
    documents: DocumentsName = "pack"
    """"pack" joins documents, each closed by the end-of-text token, into one stream of full sequences; "separate" does
    too, but documents do not see each other, positions restart in each, and its last token has no target; "cut" cuts
    each document on its own and pads its last sequence."""
    balance: BalanceName = "none"
    """"flops" moves sequences between the micro-steps and replicas of a step so that replicas compute equal amounts of
    attention at a time, for documents = "separate"; each step keeps its sequences."""
    eval_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents (or of the text, if these are few) held out for evaluation; 0: nothing. If not set, a text
    too short to hold out a sequence is all for training."""
    on_change: Literal["refuse", "continue"] = "refuse"
    """If the text has changed when a run resumes: "refuse", or "continue" on the new text: then paths, text_field,
    hub_split and extensions may change; the tokenizer stays the same."""

    @model_validator(mode="after")
    def _of_conversations(self) -> "DataConfig":
        if self.shared_prefix and self.messages is None:
            raise ConfigError(
                "data.shared_prefix = true: is for conversations; set data.messages, or leave it out"
            )
        if self.messages is not None:
            # Compared with the defaults, since a run's record sets all keys.
            for name in ("text_field", "documents", "extensions", "hub_split"):
                if getattr(self, name) != DataConfig.model_fields[name].default:
                    raise ConfigError(
                        f"data.{name}: is of text, and data.messages reads conversations; remove one"
                    )
        return self

    @property
    def endings(self) -> tuple[str, ...]:
        """Return the endings of files that are read in folders."""
        return self.extensions if self.messages is None else CONVERSATIONS

    @field_validator("extensions")
    @classmethod
    def _with_dots(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for extension in value:
            if not extension.startswith("."):
                raise ConfigError(
                    f'data.extensions = "{extension}": has no dot; write ".{extension}"'
                )
        return value


# Offsets of Arrow strings are 32-bit.
_MAX_TEXT_BYTES: Final = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """Local text files in the order of paths and names, and lines on what was left out."""

    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def find_files(config: DataConfig) -> FoundFiles:
    """List the files that local paths name, or that are below them and have an ending of such data, each once."""
    endings = tuple(extension.lower() for extension in config.endings)
    remedy = (
        "give .jsonl files with conversations"
        if config.messages is not None
        else "correct it or data.extensions"
    )
    files: dict[Path, Path] = {}
    # Files are keyed by their resolved path, so that a file reached twice is one document.
    left_out: list[str] = []
    for name in (path for path in config.paths if not path.startswith("hub:")):
        with refused(
            f'data.paths = "{name}": cannot be read',
            OSError,
            RuntimeError,
            remedy="; correct it",
        ):
            for file in _files_at(
                Path(name).expanduser(), name, endings, left_out, remedy
            ):
                size = file.stat().st_size
                if size > _MAX_TEXT_BYTES and file.suffix.lower() not in (
                    ".jsonl",
                    ".parquet",
                ):
                    raise ConfigError(
                        f'data.paths = "{file}": is larger than 2 GiB; split it, or make it a .jsonl file'
                    )
                files.setdefault(file.resolve(), file)
    return FoundFiles(files=list(files.values()), left_out=left_out)


def _files_at(
    path: Path, name: str, endings: tuple[str, ...], left_out: list[str], remedy: str
) -> list[Path]:
    """Return the files at ``path``: itself, or all below a folder with one of the endings, sorted.

    Its error messages use ``name``, as the user wrote it. Dangling links and pipes are left out, with a line in
    ``left_out``.
    """
    if path.is_dir():
        found = sorted(_walk(path, endings), key=Path.as_posix)
        files = [file for file in found if file.is_file()]
        if len(files) < len(found):
            left_out.append(
                f"{name}: left out {len(found) - len(files)} links to nothing, pipes and the like"
            )
        if not files:
            raise ConfigError(
                f'data.paths = "{name}": no file in it ends in {few(endings)}; {remedy}'
            )
        return files
    if not path.exists():
        raise ConfigError(
            f'data.paths = "{name}": does not exist in {Path.cwd()}; correct it, or write "hub:{name}" for the Hub'
        )
    if not path.is_file():
        raise ConfigError(
            f'data.paths = "{name}": is no file that can be read twice; write what it gives into one'
        )
    return [path]


def _walk(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(endings):
                yield Path(parent, name)
