"""Cost of caches in fewer bits for a model on a text: change of the loss and of perplexity, and bytes.

python -m benchmarks.cache_cost runs/demo/model --text-file book.txt --scored 512
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import typer

from ringspan.cli.commands.bench import Ranks
from ringspan.cli.commands.generate import check_folder, prompt_ids, prompt_text
from ringspan.core.errors import ConfigError
from ringspan.core.names import CACHE_DTYPE_NAMES, CacheDtypeName, find_name
from ringspan.generate.folder import load_config, load_tokenizer
from ringspan.generate.session import session
from ringspan.generate.settings import GenerateSettings
from ringspan.measure.machine import describe_machine
from ringspan.torch.runtime.launch import launch, local_device

DTYPES: Final[tuple[CacheDtypeName, ...]] = ("bfloat16", "fp8", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class CacheCase:
    """A model's folder, the caches to compare with the model's own, and how many last tokens are scored.

    Raises:
        ConfigError: no dtype of a cache, or no token to score.
    """

    folder: str
    ranks: int = 2
    dtypes: tuple[CacheDtypeName, ...] = DTYPES
    scored: int = 256

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            find_name("dtype of a cache", dtype, CACHE_DTYPE_NAMES, ConfigError)

    @property
    def settings(self) -> GenerateSettings:
        return GenerateSettings(folder=self.folder, max_new_tokens=1)

    def check_text(self, tokens: int) -> None:
        """Raise a ConfigError for a text of which nothing is read before the tokens that are scored."""
        if tokens < self.scored + 2:
            raise ConfigError(
                f"--scored {self.scored}: the text has {tokens:,} tokens, and one at least is read before those that "
                "are scored, which are not its first; give a longer text, or score fewer"
            )


def run(case: CacheCase, ids: Sequence[int]) -> dict[str, Any]:
    """Read a text but for its last tokens into each kind of cache, and score these over it.

    ``perplexity_change`` is relative; ``logits_error`` is the norm of the change of the last token's logits, by theirs.
    """
    case.check_text(len(ids))
    result = launch(_measure, case.ranks, case, list(ids))[0]
    return {**result, "config": asdict(case), "machine": describe_machine()}


def _measure(case: CacheCase, ids: list[int]) -> dict[str, Any]:
    config = load_config(case.settings)
    text = torch.tensor([ids], device=local_device())
    rows: list[dict[str, Any]] = []
    with session(case.settings, config, load_tokenizer(case.folder, config)) as asked:
        costs = {
            dtype: asked.model.cache_cost(text, dtype, case.scored)
            for dtype in case.dtypes
        }
    sizes = torch.tensor(
        [[cost.cache_bytes, cost.cache_bytes_then] for cost in costs.values()],
        device=local_device(),
    )
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    own = next(iter(costs.values()))
    for (dtype, cost), (_, then) in zip(costs.items(), sizes.tolist(), strict=True):
        rows.append(
            {
                "dtype": dtype,
                "loss": cost.loss_then,
                "loss_change": cost.loss_then - cost.loss,
                "perplexity": cost.perplexity_then,
                "perplexity_change": cost.perplexity_then / cost.perplexity - 1,
                "logits_error": cost.logits_error,
                "cache_bytes_per_rank": then,
            }
        )
    return {
        "tokens": len(ids),
        "scored": case.scored,
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
        "loss": own.loss,
        "perplexity": own.perplexity,
        "cache_bytes_per_rank": int(sizes[0, 0]),
        "caches": rows,
    }


def main(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of the model and its tokenizer.", show_default=False
        ),
    ],
    text_file: Annotated[
        Path,
        typer.Option(
            help="The text; - reads standard input. The first tokens are read, the last scored."
        ),
    ],
    dtypes: Annotated[str, typer.Option(help="Of the caches, with commas.")] = ",".join(
        DTYPES
    ),
    scored: Annotated[
        int, typer.Option(min=1, help="Tokens whose loss is compared.")
    ] = 256,
    length: Annotated[
        int | None,
        typer.Option(min=3, help="Tokens of the text to take; default: all."),
    ] = None,
    ranks: Ranks = 2,
) -> None:
    """Measure, and print the result as one JSON object."""
    check_folder(model)
    chosen = tuple(dict.fromkeys(dtypes.split(",")))
    case = CacheCase(folder=str(model), ranks=ranks, dtypes=chosen, scored=scored)  # type: ignore[arg-type]
    ids = prompt_ids(case.settings, prompt_text(None, text_file, "--text-file"), length)
    print(json.dumps(run(case, ids.tolist())))


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from benchmarks import cache_cost

    typer.run(cache_cost.main)
