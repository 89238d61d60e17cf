"""Weight files that transformers opens in a folder or Hub repository."""

import json
import re
from collections.abc import Callable, Collection
from pathlib import PurePosixPath
from typing import Final

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_CONFIG
from ringspan.core.messages.lines import one_line

WEIGHTS: Final = "model.safetensors"
INDEX: Final = f"{WEIGHTS}.index.json"
# A model's other files: configs, tokenizer, code.
_BESIDE: Final = re.compile(r"[^/]+\.json|.+\.py")
_PICKLES: Final = ".bin", ".pth", ".pt"
_SHARD: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def weights_in(
    names: Collection[str],
    read: Callable[[str], str],
    *,
    named: str | None = None,
    variant: str | None = None,
) -> dict[str, set[str]]:
    """Return the weight files among some names, each with its indexed tensors; ConfigError if no safetensors."""
    if named is not None and not (
        _is_inside(named)
        and named.endswith((".safetensors", ".safetensors.index.json"))
    ):
        raise ConfigError(
            f"transformers_weights = {named!r} in {MODEL_CONFIG} is no safetensors file of this folder; use one"
        )
    single, index = (_of_variant(name, variant) for name in (WEIGHTS, INDEX))
    opened = (
        named
        if named is not None
        else next((name for name in (single, index) if name in names), None)
    )
    if opened is None:
        raise ConfigError(_why_none(names, single, index))
    if opened.endswith(".safetensors"):
        return {opened: set()}
    found: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(read(opened))["weight_map"].items():
            if not _is_inside(file):
                raise ConfigError(
                    f"{opened}: {name} is in {file!r}, which is no file of this folder; copy it there"
                )
            found.setdefault(file, set()).add(name)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ConfigError(f"{opened}: cannot be read: {one_line(error)}") from error
    return dict(sorted(found.items()))


def files_to_download(
    names: Collection[str], read: Callable[[str], str], *, variant: str | None = None
) -> list[str]:
    """Select a model's or adapter's files in a repository, each weight once; raise as ``weights_in``."""
    beside = [name for name in names if _BESIDE.fullmatch(name)]
    named = (
        json.loads(read(MODEL_CONFIG)).get("transformers_weights")
        if MODEL_CONFIG in names
        else None
    )
    if ADAPTER_CONFIG in names:
        beside += {ADAPTER_WEIGHTS} & set(names)
        if named is None and not {WEIGHTS, INDEX} & set(names):
            return beside
    return beside + list(weights_in(names, read, named=named, variant=variant))


def refuse_beside(names: Collection[str], *, adapter: bool) -> None:
    """Raise ConfigError for shards of ranks, or an unexpected adapter, which transformers would open."""
    if shard := next(filter(_SHARD.fullmatch, sorted(names)), None):
        raise ConfigError(
            f"has {shard}, a distributed checkpoint; save the model with save_pretrained"
        )
    if ADAPTER_CONFIG in names and not adapter:
        raise ConfigError(
            "is an adapter of PEFT, or has one next to its weights; load its base model, then "
            "PeftModel.from_pretrained, and parallelize"
        )


def _of_variant(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _why_none(names: Collection[str], single: str, index: str) -> str:
    """Explain that neither ``single`` nor ``index`` is among ``names``: which other weights are, and the remedy."""
    first = min(
        (name for name in names if name.endswith((".safetensors", *_PICKLES))),
        default=None,
    )
    found, remedy = f"neither {single} nor {index}", "save it with save_pretrained"
    if {WEIGHTS, INDEX} & set(names):
        found, remedy = f"no {single}", "leave variant out"
    elif first is not None:
        why = (
            "a pickle, which is not opened"
            if first.endswith(_PICKLES)
            else "which transformers does not open"
        )
        found = f"only {first}, {why}"
        if of_variant := re.fullmatch(
            r"model\.([^.-]+)(-\d{5}-of-\d{5})?\.safetensors", first
        ):
            found, remedy = (
                f"only {first}",
                f"give from_pretrained variant={of_variant[1]!r}",
            )
    return f"has no weights in safetensors: {found}; {remedy}"
