"""Signed JSON, ``{"sha256": ..., "manifest": {...}}``, and digests of files next to it."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, cast

from ringspan.core.errors import CheckpointError
from ringspan.core.messages.lines import one_line, shortened

_MAX_BYTES: Final = 1 << 30


def signed(values: object) -> str:
    return json.dumps(
        {"sha256": digest_of(values), "manifest": values}, allow_nan=False
    )


def read_signed(path: Path, reason: str) -> object:
    """Return a signed file's content; CheckpointError if missing (for ``reason``), cut or changed."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes are too many for a manifest; use another"
            )
        # Decoded here: json.loads guesses the encoding of bytes.
        whole: Any = json.loads(path.read_bytes().decode("utf-8"))
        if not isinstance(whole, dict) or set(cast(dict[str, Any], whole)) != {
            "sha256",
            "manifest",
        }:
            raise CheckpointError(
                f"{path}: is not a manifest of ringspan; give a folder that it wrote"
            )
        values, expected = (
            cast(dict[str, Any], whole)["manifest"],
            cast(dict[str, Any], whole)["sha256"],
        )
        found = digest_of(values)
        if expected != found:
            expected = shortened(str(expected))
            raise CheckpointError(
                f"{path}: changed after it was written (sha256 {found}, must be {expected})"
            )
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; {reason}") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    return values


def why_not_written(path: Path, num_bytes: int, sha256: str) -> str | None:
    """Return why a file differs from its size and digest; CheckpointError if unreadable."""
    try:
        found = path.stat().st_size
        if found != num_bytes:
            return f"has {found} bytes, expected {num_bytes}"
        digest = file_digest(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: is missing, expected {num_bytes} bytes"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    return (
        None
        if digest == sha256
        else f"has sha256 {digest[:16]}..., expected {sha256[:16]}..."
    )


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(values: object) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
