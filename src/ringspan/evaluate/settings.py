"""The settings of ``ringspan eval``, checked without a framework."""

import math
from dataclasses import dataclass
from pathlib import Path

from ringspan.core.errors import ConfigError
from ringspan.evaluate.tasks import TASKS
from ringspan.generate.settings import GenerateSettings

PERPLEXITY = "perplexity"


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """One task with one model; raises ConfigError for an invalid value, by the name of its option."""

    folder: str
    task: str
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens of prompt and answer together; for perplexity, of a document."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    items: int = 20
    """Questions per length and depth, or documents."""
    seed: int = 0
    needles: int | None = None
    distractors: int = 0
    text: tuple[str, ...] = ()
    plain: bool = False
    """No chat template."""
    dtype: str = "auto"
    cache_dtype: str = "auto"
    tp: int = 1
    weights: str = "auto"
    prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        self.generating(1)
        for name in ("lengths", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"--{name} {','.join(map(str, values))}: give at least one, and none twice")
        for length in self.lengths:
            if length < 2:
                raise ConfigError(f"--lengths {length}: at least 2 tokens are needed")
        for depth in self.depths:
            if not (math.isfinite(depth) and 0 <= depth <= 1):
                raise ConfigError(f"--depths {depth}: should be from 0 (beginning of the text) to 1 (its end)")
        for name in ("items", "needles"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name} {value}: should be at least 1")
        if self.distractors < 0:
            raise ConfigError(f"--distractors {self.distractors}: should be at least 0")
        for path in self.text:
            if not Path(path).is_file():
                raise ConfigError(f"--text {path}: is no file; give one that exists")

    @property
    def cells(self) -> list[tuple[int, float | None]]:
        """Return the lengths and, if the task has them, depths."""
        depths = self.depths if self.task != PERPLEXITY and TASKS[self.task].has_depth else (None,)
        return [(length, depth) for length in self.lengths for depth in depths]

    def generating(self, max_new_tokens: int) -> GenerateSettings:
        """Return the settings for loading the model and for greedy answers."""
        return GenerateSettings(
            folder=self.folder,
            max_new_tokens=max_new_tokens,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            tp=self.tp,
            weights=self.weights,
            prefill_tokens=self.prefill_tokens,
        )
