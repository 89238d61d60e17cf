"""Answers to lm-eval's requests in a file, from which an interrupted run continues on any number of ranks."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringspan.evaluate.records import Records
from ringspan.generate.session import from_first_rank


class Answers:
    """A file of answers on the first rank, shared with the others.

    lm-eval's own cache is per process, and interrupted ranks have different ones.

    Raises:
        ConfigError: the file cannot be read or made; on all ranks.
    """

    def __init__(self, path: Path) -> None:
        self._records = Records(path)
        from_first_rank(self._records.load)

    @property
    def num_kept(self) -> int:
        """Return the number of kept answers, on the first rank."""
        return len(self._records.by_key)

    def known(self, method: str, every: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the kept answer of each request, or None; the same on every rank."""
        keys = [None if _is_drawn(asked) else _key(method, asked) for asked in every]
        found = from_first_rank(lambda: [self._records.by_key.get(key, {}).get("answer") for key in keys])
        return [tuple(answer) if isinstance(answer, list) else answer for answer in found]

    def add(self, method: str, asked: tuple[Any, ...], answer: Any) -> None:
        if dist.get_rank() == 0 and not _is_drawn(asked):
            self._records.add({"key": _key(method, asked), "answer": answer})


def _is_drawn(asked: tuple[Any, ...]) -> bool:
    """Return True for an answer drawn at random: it is drawn anew each time, as with lm-eval's own cache."""
    return isinstance(asked[-1], dict) and bool(asked[-1].get("do_sample"))


def _key(method: str, asked: tuple[Any, ...]) -> tuple[str, str]:
    text = json.dumps(asked, sort_keys=True, default=str)
    return method, hashlib.sha256(text.encode()).hexdigest()
