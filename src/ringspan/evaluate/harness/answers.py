"""Answers to lm-eval's requests in a file: a run that was ended continues after them, on any number of ranks."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringspan.evaluate.records import Records
from ringspan.generate.session import from_first_rank


class Answers:
    """A file of the first rank, of which the others hear: lm-eval's own cache is one of each process, and ranks that
    were ended have different ones.

    Raises:
        ConfigError: the file cannot be read or made; on every rank.
    """

    def __init__(self, path: Path) -> None:
        self._records = Records(path)
        from_first_rank(self._records.load)

    @property
    def num_kept(self) -> int:
        """On the first rank."""
        return len(self._records.by_key)

    def known(self, method: str, every: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answer of each request that has one, None for the others; the same on every rank."""
        keys = [None if _is_drawn(asked) else _key(method, asked) for asked in every]
        found = from_first_rank(lambda: [self._records.by_key.get(key, {}).get("answer") for key in keys])
        return [tuple(answer) if isinstance(answer, list) else answer for answer in found]

    def add(self, method: str, asked: tuple[Any, ...], answer: Any) -> None:
        """Keep an answer."""
        if dist.get_rank() == 0 and not _is_drawn(asked):
            self._records.add({"key": _key(method, asked), "answer": answer})


def _is_drawn(asked: tuple[Any, ...]) -> bool:
    """Whether an answer is one of many: it is drawn anew each time, as it is with lm-eval's own cache."""
    return isinstance(asked[-1], dict) and bool(asked[-1].get("do_sample"))


def _key(method: str, asked: tuple[Any, ...]) -> tuple[str, str]:
    text = json.dumps(asked, sort_keys=True, default=str)
    return method, hashlib.sha256(text.encode()).hexdigest()
