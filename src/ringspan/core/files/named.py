"""Paths on the command line: small files and output folders."""

import errno
import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from ringspan.core.messages.lines import one_line

# the files that PEFT writes into a folder
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
MODEL_CONFIG: Final = "config.json"
_MOST_BYTES: Final = 16 << 20  # a model's config has a few thousand


def read_small(path: str | Path) -> str:
    """Read a text file without its byte order mark; OSError if large or not a plain file (some never end)."""
    # Opening a pipe would wait for its writer.
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(
            errno.EINVAL,
            "a pipe or a device is read once, or never ends: write what it gives into a file",
        )
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES >> 20} MiB")
    return data.decode("utf-8-sig")


def why_no_model(folder: Path) -> str | None:
    if any((folder / name).is_file() for name in (MODEL_CONFIG, ADAPTER_CONFIG)):
        return None
    return f"has no {MODEL_CONFIG} and no {ADAPTER_CONFIG}; give the folder that a model was saved into"


def why_no_config(path: Path) -> str | None:
    """Return why a local path is neither a model's folder nor its config.json; None if it is one."""
    if path.is_dir() and not (path / MODEL_CONFIG).is_file():
        if (path / ADAPTER_CONFIG).is_file():
            return f"is the folder of an adapter; give that of its base model ({_base_named(path)})"
        return f"has no {MODEL_CONFIG}; give the folder that a model was saved into"
    file = path / MODEL_CONFIG if path.is_dir() else path
    try:
        values: Any = json.loads(read_small(file))
    except OSError as error:
        return f"cannot be read ({error.strerror}); give the folder that a model was saved into"
    except (ValueError, RecursionError) as error:
        return f"{file} is not valid JSON ({one_line(error)}); give the folder that a model was saved into"
    if not isinstance(cast(object, values), dict) or not isinstance(
        values.get("model_type"), str
    ):
        return f"{file} has no model_type of transformers; give the config of a Hugging Face model"
    return None


def _base_named(adapter: Path) -> str:
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        return str(
            json.loads(read_small(adapter / ADAPTER_CONFIG)).get(
                "base_model_name_or_path"
            )
        )
    return f"base_model_name_or_path in its {ADAPTER_CONFIG}"


def why_no_folder(path: Path) -> str | None:
    try:
        there = next(
            parent for parent in (path, *path.absolute().parents) if parent.exists()
        )
    except OSError as error:  # such as a name that is too long
        return error.strerror or type(error).__name__
    if not there.is_dir():
        return f"{there} is a file"
    # Try it, since permissions do not tell all: /proc takes no folders, and root ignores permissions.
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".ringspan-", dir=there))
    except PermissionError:
        return f"no permission to write in {there}"
    except OSError as error:
        return f"{there}: {error.strerror}"
    return None
