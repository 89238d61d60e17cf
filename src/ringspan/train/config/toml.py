"""The TOML file of a run: its values, or one line that says what to write instead."""

import tomllib
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import read_small
from ringspan.core.messages.lines import one_line

# What tomllib says begins with one of these.
_REMEDIES: Final = {
    "Invalid value (at end of document)": "a value is missing there, or a bracket is still open",
    "Invalid value": "strings need quotes, and true and false are lower-case",
    "Cannot overwrite a value": "the key is there twice: remove one",
    "Duplicate inline table key": "the key is there twice: remove one",
    "Cannot declare": "the table is there twice: join the two",
    "Cannot mutate immutable": "the table is there twice: join the two",
    "Cannot redefine namespace": "the table is there twice: join the two",
    "Invalid statement": "a line is a [table], a key = value or a # comment",
    "Invalid initial character for a key part": "a line is a [table], a key = value or a # comment",
    "Expected '=' after a key": "write key = value",
    "Expected newline or end of document": "write one key = value on a line, and numbers without commas",
    "Expected ']": "close the [table] with a ]",
    "Unclosed": "close the bracket, and put commas between its values",
    "Unterminated": "close the quotes",
    "Expected '\"": "close the quotes",
    'Expected "': "close the quotes",
    "Unescaped '\\'": "write strings with a \\ in single quotes",
    "Invalid hex value": "write strings with a \\ in single quotes",
    "Illegal character": "remove it; in a string of one line a line break is written \\n",
    "Escaped character": "write strings with a \\ in single quotes",
}


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the values of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        text = read_small(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {one_line(error)}; save it as UTF-8 text") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets as deep
        raise ConfigError(f"{path}: is not valid TOML: {one_line(error)}; {_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    message = str(error)
    return next((remedy for start, remedy in _REMEDIES.items() if message.startswith(start)), "correct that line")
