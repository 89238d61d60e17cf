"""What ``ringspan eval`` is asked for, checked without a framework."""

import math
from dataclasses import dataclass
from pathlib import Path

from ringspan.core.errors import ConfigError
from ringspan.evaluate.tasks import TASKS
from ringspan.generate.settings import GenerateSettings

PERPLEXITY = "perplexity"


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """One task with one model.

    Raises:
        ConfigError: a value that cannot be meant, by the name of its option.
    """

    folder: str
    task: str
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens of the prompt and the answer together; of perplexity, of a document."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    items: int = 20
    """Questions per length and depth, or documents."""
    seed: int = 0
    needles: int | None = None
    distractors: int = 0
    text: tuple[str, ...] = ()
    plain: bool = False
    """Without the chat template."""
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
                raise ConfigError(f"--text {path}: is no file")

    @property
    def cells(self) -> list[tuple[int, float | None]]:
        """Lengths and, of a task that has them, depths."""
        depths = self.depths if self.task != PERPLEXITY and TASKS[self.task].has_depth else (None,)
        return [(length, depth) for length in self.lengths for depth in depths]

    def generating(self, max_new_tokens: int) -> GenerateSettings:
        """How the model is loaded and answers: with its most likely tokens."""
        return GenerateSettings(
            folder=self.folder,
            max_new_tokens=max_new_tokens,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            tp=self.tp,
            weights=self.weights,
            prefill_tokens=self.prefill_tokens,
        )
