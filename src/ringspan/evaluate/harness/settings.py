"""The settings of ``ringspan eval harness``, checked without a framework."""

from dataclasses import dataclass

from ringspan.core.errors import ConfigError
from ringspan.generate.settings import GenerateSettings


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """Tasks of lm-eval with one model; raises ConfigError for an invalid value, by the name of its option."""

    folder: str
    tasks: tuple[str, ...]
    include: str | None = None
    """Folder with further task definitions."""
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    seed: int | None = None
    """Seed of all random choices, examples included; lm-eval's own seeds when None."""
    dtype: str = "auto"
    tp: int = 1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("--tasks: give at least one task of lm-eval; `lm_eval ls tasks` lists them")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: should be at least 1")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot {self.num_fewshot}: should be at least 0")
        if self.seed is not None and not 0 <= self.seed < 1 << 32:  # numpy's limit
            raise ConfigError(f"--seed {self.seed}: should be from 0 to 2^32 - 1")
        _ = self.generating

    @property
    def generating(self) -> GenerateSettings:
        """Return the settings for loading the model."""
        return GenerateSettings(folder=self.folder, dtype=self.dtype, tp=self.tp)

    @property
    def seeds(self) -> dict[str, int]:
        """Return the seeds for ``simple_evaluate``."""
        if self.seed is None:
            return {}
        names = "random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"
        return dict.fromkeys(names, self.seed)
