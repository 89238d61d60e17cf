"""Real text: the user's files, or the documentation and sources of every Python installation."""

import re
import sysconfig
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ringspan.core.errors import ConfigError

_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")


def read_text(path: str | Path) -> str:
    """Read a text file of any size; raise ConfigError if it is unreadable or not UTF-8."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--text {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path}: is not UTF-8 text (byte {error.start}); convert it") from error
    if not text.strip():
        raise ConfigError(f"--text {path}: has no text; give another file")
    return text


def prose(paths: Sequence[str] = ()) -> str:
    """Read the named files, or the language reference that ``help()`` shows (465,000 characters in Python 3.11)."""
    if paths:
        return "\n\n".join(read_text(path) for path in paths)
    topics = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def sentences(text: str) -> tuple[str, ...]:
    """Split a text into sentences, each on one line; parts without a word are left out."""
    parts = (" ".join(part.split()) for part in _SENTENCE_END.split(text))
    found = tuple(part for part in parts if re.search(r"[A-Za-z]{2}", part))
    if not found:
        raise ConfigError("the text has no sentences; give another --text")
    return found


def long_documents(paths: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return (name, text) of the named files, or of the language reference and standard library, longest first."""
    documents = [(str(path), read_text(path)) for path in paths]
    if not documents:
        folder = Path(sysconfig.get_path("stdlib"))
        modules = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))]
        documents = [("language reference", prose()), *modules]
    return sorted(documents, key=lambda document: (-len(document[1]), document[0]))
