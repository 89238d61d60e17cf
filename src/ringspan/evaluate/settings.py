"""Settings of ``ringspan eval`` and its folders, checked without a framework."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import why_no_model
from ringspan.core.messages.lines import refused
from ringspan.evaluate.tasks import TASKS
from ringspan.generate.settings import ModelSettings, check_option

PERPLEXITY: Final = "perplexity"
_TOKENIZERS: Final = "*.model", "*.txt", "*.jinja"
_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class EvalSettings(ModelSettings):
    """One task with one model; raises ConfigError for an invalid value, by its option."""

    task: str
    # Tokens of prompt and answer together; for perplexity, tokens of a document.
    lengths: tuple[int, ...] = (
        1024,
        2048,
        4096,
    )
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    items: int = 20  # questions per length and depth, or number of documents
    seed: int = 0
    needles: int | None = None
    distractors: int = 0
    text: tuple[str, ...] = ()
    plain: bool = False  # True leaves out the chat template

    def __post_init__(self) -> None:
        """Raise ConfigError, naming the option, for the first value out of range or file that does not exist."""
        self.generating()  # for its checks
        for name in ("lengths", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(
                    f"--{name} {','.join(map(str, values))}: give at least one, and none twice"
                )
        for length in self.lengths:
            if length < 2:
                option = "--length" if self.task == PERPLEXITY else "--lengths"
                raise ConfigError(f"{option} {length}: at least 2 tokens are needed")
        for depth in self.depths:
            if not (math.isfinite(depth) and 0 <= depth <= 1):
                raise ConfigError(
                    f"--depths {depth}: should be from 0 (beginning of the text) to 1 (its end)"
                )
        check_option("items", self.items, self.items >= 1, "at least 1")
        check_option(
            "needles",
            self.needles,
            self.needles is None or self.needles >= 1,
            "at least 1",
        )
        check_option(
            "distractors", self.distractors, self.distractors >= 0, "at least 0"
        )
        for path in self.text:
            if not Path(path).is_file():
                raise ConfigError(f"--text {path}: is no file; give one that exists")

    @property
    def chats(self) -> bool:
        """Return whether prompts are written by the chat template, if there is one."""
        return self.task != PERPLEXITY and not self.plain

    @property
    def cells(self) -> list[tuple[int, float | None]]:
        depths = (
            self.depths
            if self.task != PERPLEXITY and TASKS[self.task].has_depth
            else (None,)
        )
        return [(length, depth) for length in self.lengths for depth in depths]


@dataclass(frozen=True, kw_only=True)
class HarnessSettings(ModelSettings):
    """Tasks of lm-eval with one model; raises ConfigError for an invalid value, by its option."""

    tasks: tuple[str, ...]
    include: str | None = None  # folder with further task definitions
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    # Seed of all random choices, examples included; None leaves lm-eval's own seeds.
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError(
                "--tasks: give at least one task of lm-eval; `lm_eval ls tasks` lists them"
            )
        check_option(
            "limit", self.limit, self.limit is None or self.limit >= 1, "at least 1"
        )
        check_option(
            "num_fewshot",
            self.num_fewshot,
            self.num_fewshot is None or self.num_fewshot >= 0,
            "at least 0",
        )
        is_seed = self.seed is None or 0 <= self.seed < 1 << 32  # numpy's limit
        check_option("seed", self.seed, is_seed, "from 0 to 2^32 - 1")
        self.generating()  # for its checks

    @property
    def seeds(self) -> dict[str, int]:
        if self.seed is None:
            return {}
        names = (
            "random_seed",
            "numpy_random_seed",
            "torch_random_seed",
            "fewshot_random_seed",
        )
        return dict.fromkeys(names, self.seed)


def local_folder(model: str) -> str:
    """Return a folder, or the Hub's local copy, downloaded if needed; raise ConfigError if neither exists."""
    folder = Path(model)
    if folder.is_dir():
        if reason := why_no_model(folder):
            raise ConfigError(f"{model}: {reason}")
        return str(folder)
    if folder.exists() or not _NAME.fullmatch(model) or model.startswith("."):
        raise ConfigError(
            f"{model}: there is no such folder; give one with a model and its tokenizer"
        )
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from ringspan.torch.model.weights.files import folder_of

    where = f"{model}: there is no such folder, and the Hub has or gives no such model"
    with refused(where, HfHubHTTPError, HFValidationError, OSError, ValueError):
        return str(folder_of(model, more=_TOKENIZERS))
