"""What ``ringspan eval harness`` is asked for, checked without a framework."""

from dataclasses import dataclass

from ringspan.core.errors import ConfigError
from ringspan.generate.settings import GenerateSettings


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """Tasks of lm-eval with one model.

    Raises:
        ConfigError: a value that cannot be meant, by the name of its option.
    """

    folder: str
    tasks: tuple[str, ...]
    include: str | None = None
    """Folder with definitions of further tasks."""
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    seed: int = 0
    dtype: str = "auto"
    tp: int = 1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("--tasks: give at least one task of lm-eval; `lm_eval ls tasks` lists them")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: should be at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot {self.num_fewshot}: should be at least 0")
        _ = self.generating

    @property
    def generating(self) -> GenerateSettings:
        """How the model is loaded."""
        return GenerateSettings(folder=self.folder, seed=self.seed, dtype=self.dtype, tp=self.tp)
