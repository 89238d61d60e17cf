"""Settings of ``ringspan generate``, checked without a framework."""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from ringspan.core.errors import ConfigError
from ringspan.core.names import CACHE_DTYPE_NAMES, WEIGHTS_NAMES

DTYPES: Final = "auto", "float32", "bfloat16"
_CACHE_DTYPES: Final = "auto", *CACHE_DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Loading of a folder's model, and its cache."""

    folder: str
    dtype: str = "auto"
    cache_dtype: str = "auto"
    tp: int = 1
    weights: str = "auto"
    prefill_tokens: int | None = None
    """Tokens of the prompt that a rank reads at once; the library's default when None."""

    def generating(self, max_new_tokens: int = 1) -> "GenerateSettings":
        """Return the settings for loading the model and for greedy answers."""
        own = {each.name: getattr(self, each.name) for each in fields(ModelSettings)}
        return GenerateSettings(max_new_tokens=max_new_tokens, **own)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(ModelSettings):
    """A run of the command; raises ConfigError for an invalid value, by its option."""

    max_new_tokens: int = 200
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    load_cache: str | None = None
    """Saved cache that the prompt follows."""
    save_cache: str | None = None
    """New folder for the cache of all tokens."""
    silence_seconds: float = 60.0
    """Seconds of silence of a rank after which all are ended."""

    def __post_init__(self) -> None:
        """Raise ConfigError for the first option that is out of range, unknown, or a wrong folder."""
        for name in ("max_new_tokens", "tp", "prefill_tokens"):
            value = getattr(self, name)
            check_option(name, value, value is None or value >= 1, "at least 1")
        check_option("seed", self.seed, 0 <= self.seed < 1 << 63, "from 0 to 2^63 - 1")
        hint = "leave --temperature, --top-p and --top-k out for the most likely tokens"
        heat, top_p, top_k = self.temperature, self.top_p, self.top_k
        check_option(
            "temperature",
            heat,
            heat is None or 0 < heat < math.inf,
            f"above 0 and finite; {hint}",
        )
        check_option(
            "top_p",
            top_p,
            top_p is None or 0 < top_p <= 1,
            f"above 0 and at most 1; {hint}",
        )
        check_option("top_k", top_k, top_k is None or top_k >= 1, f"at least 1; {hint}")
        for name, names in (
            ("dtype", DTYPES),
            ("cache_dtype", _CACHE_DTYPES),
            ("weights", WEIGHTS_NAMES),
        ):
            value = getattr(self, name)
            check_option(name, value, value in names, f"one of {', '.join(names)}")
        if (new := self.save_cache) is not None:
            check_option(
                "save_cache",
                new,
                not os.path.exists(new),
                "a new folder; this one exists",
            )
            check_option(
                "save_cache",
                new,
                Path(new).absolute().parent.is_dir(),
                "in a folder that exists",
            )
        if (old := self.load_cache) is not None:
            is_there = Path(old, "manifest.json").is_file()
            check_option(
                "load_cache",
                old,
                is_there,
                "a folder that --save-cache wrote, with its manifest.json",
            )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError for a number of ranks that does not make rings of ``tp``."""
        if num_ranks < 1:
            raise ConfigError(f"--nproc {num_ranks}: at least one process is needed")
        if num_ranks % self.tp:
            raise ConfigError(
                f"--tp {self.tp}: does not divide the {num_ranks} processes; choose a divisor"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for transformers' ``generate``; omitted ones are the model's generation_config's."""
        sampling = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        given = {name: value for name, value in sampling.items() if value is not None}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": bool(given),
            **given,
        }


def check_option(name: str, value: object, is_right: bool, should_be: str) -> None:
    if not is_right:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: should be {should_be}")
