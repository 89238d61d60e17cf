"""Loss by position over long documents: does more context help?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ringspan.core.errors import ConfigError
from ringspan.evaluate.settings import EvalSettings
from ringspan.generate.session import PATIENCE_SECONDS, Session
from ringspan.torch.model.tasks.causal_lm import token_logprobs
from ringspan.torch.runtime.launch import local_device
from ringspan.torch.shard_batch import shard_batch

FIRST_EDGE: Final = 64


@dataclass(frozen=True)
class Document:
    name: str
    ids: list[int]
    sizes: list[int] | None  # bytes of each token; None if the tokenizer does not tell


def chosen(
    texts: Sequence[tuple[str, str]],
    settings: EvalSettings,
    lengths: Sequence[int],
    tokenizer: Any,
) -> tuple[dict[tuple[Any, ...], Document], list[dict[str, Any]]]:
    """Choose the first ``items`` documents per length, by (length, index); return them and the skipped lengths."""
    found: dict[tuple[Any, ...], Document] = {}
    missing: list[dict[str, Any]] = []
    most = max(lengths)
    made = [
        _document(name, text, most, tokenizer) for name, text in texts[: settings.items]
    ]
    for length in lengths:
        there = [document for document in made if len(document.ids) >= length]
        found |= {
            (length, index): Document(
                each.name, each.ids[:length], each.sizes and each.sizes[:length]
            )
            for index, each in enumerate(there)
        }
        if settings.text and len(made) < len(texts):
            why = f"--items {settings.items}: {len(texts) - len(made)} of {len(texts)} documents, the shortest"
            missing.append({"length": length, "why": why})
        if len(there) < len(made):
            missing.append(
                {
                    "length": length,
                    "why": f"{len(made) - len(there)} of {len(made)} documents are shorter",
                }
            )
    if not found:
        longest = max(len(document.ids) for document in made)
        raise ConfigError(
            f"--length {min(lengths)}: the longest document has {longest:,} tokens; give longer --text"
        )
    return found, missing


def _document(name: str, text: str, most: int, tokenizer: Any) -> Document:
    text = text[: 16 * most]  # on average no token is longer than 16 characters
    given = tokenizer(text, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    sizes = None
    if tokenizer.is_fast:
        sizes = _sizes(text, [stop for _, stop in given["offset_mapping"]])
    return Document(name, list(given.input_ids)[:most], sizes and sizes[:most])


def _sizes(text: str, stops: Sequence[int]) -> list[int]:
    """Compute each token's bytes by its end, so that unowned spaces go to the next, characters count once."""
    sizes, reached = [], 0
    for stop in stops:
        sizes.append(len(text[reached:stop].encode()))
        reached = max(reached, stop)
    return sizes


def edges(length: int) -> list[int]:
    """Return the ends of position ranges: 64, 128, 256, ..., and the length."""
    found = [FIRST_EDGE]
    while found[-1] < length:
        found.append(2 * found[-1])
    return [*(edge for edge in found if edge < length), length]


def measure(model: Session, document: Document) -> dict[str, Any]:
    """Return a document's record: its mean loss, and sums of nats, tokens and bytes over ranges of positions.

    The ranges end at 64, 128, 256, ... and at the length; the first token has no loss.
    """
    ids = torch.tensor([document.ids], device=local_device())
    model.watchdog.be(0, f"scoring {document.name}", PATIENCE_SECONDS)
    batch = shard_batch({"input_ids": ids, "labels": ids}, model.model.ring_mesh)
    with torch.no_grad():
        # Entry i is the loss of token i + 1.
        losses = -token_logprobs(model.model, batch)[0].double().cpu()
    parts = []
    start = 1
    for stop in edges(len(document.ids)):
        sizes = None if document.sizes is None else sum(document.sizes[start:stop])
        nats = float(losses[start - 1 : stop - 1].sum())
        parts.append(
            {
                "start": start,
                "stop": stop,
                "nats": nats,
                "tokens": stop - start,
                "bytes": sizes,
            }
        )
        start = stop
    mean = float(losses[:-1].mean())
    length = len(document.ids)
    return {
        "length": length,
        "depth": None,
        "document": document.name,
        "parts": parts,
        "loss": mean,
        "summary": f"{document.name}, {length:,} tokens: {mean:.4f} nats per token",
    }
