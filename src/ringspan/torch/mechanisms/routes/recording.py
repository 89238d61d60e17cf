"""Routes that a pass chose, of all tokens of its batch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.model.layers.routing import PassRoutes
from ringspan.torch.model.tasks.causal_lm import (
    RingCausalLM,
    gathered_tokens,
    token_logprobs,
    whole_length,
)

_passes: ContextVar[list[PassRoutes] | None] = ContextVar("recorded", default=None)


def records() -> bool:
    """Return whether routes of the passes that follow are recorded."""
    return _passes.get() is not None


def note_pass(routes: PassRoutes) -> None:
    """Keep the routes of a pass that begins, if they are recorded."""
    passes = _passes.get()
    if passes is not None:
        passes.append(routes)


class Recorded:
    """Routes of the tokens of one batch, in the order of this rank's part."""

    def __init__(self) -> None:
        self._passes: list[PassRoutes] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes of one batch; more than one are its folds, in their order."""
        token = _passes.set(self._passes)
        try:
            yield
        finally:
            _passes.reset(token)

    def whole(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Gather the routes (B, S, layers, K) of a batch on every rank of the ring; UnsupportedError without any."""
        return _gathered([each.chosen for each in self._passes], model, batch)

    def whole_live(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Gather what the routers themselves chose, also where other experts were given; like ``whole``."""
        return _gathered([each.live for each in self._passes], model, batch)


def _gathered(
    found: Sequence[Tensor | None], model: Any, batch: Mapping[str, Any]
) -> Tensor:
    """Gather local routes (tokens, layers, K) of each fold into the whole batch (B, S, layers, K)."""
    rows = len(batch["input_ids"])
    local = [each.unflatten(0, (rows, -1)) for each in found if each is not None]
    if not local:
        raise UnsupportedError(
            "routes: no layer of this model chooses experts by their scores; leave them out"
        )
    lengths = batch.get("document_lengths")
    length = whole_length(int(batch["sequence_length"]), lengths)
    return gathered_tokens(model, torch.cat(local, 1).int(), length, lengths)


@torch.no_grad()
def token_routes(model: torch.nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Compute the experts that each token of a batch goes to, on every rank of its ring, in the whole batch's order.

    Equals, on one process, the indices of each router's ``topk`` of ``model(input_ids, attention_mask)``. Given back to
    ``shard_batch`` as ``routes``, a later pass goes the same ways with weights of its own scores, also where backward
    computes a layer again.

    Args:
        model: from ``parallelize``, with mixtures of experts.
        batch: from ``shard_batch``.

    Returns:
        (B, S, layers, K) in int32: the K experts of a token in each decoder layer, -1 for layers that choose none.

    Raises:
        UnsupportedError: a model without mixtures of experts, or compiled; what ``token_logprobs`` raises for.
        PeerMismatch: ranks were given different batches, or make different calls.
    """
    given = dict(batch)
    if "shift_labels" not in given and "input_ids" in given:
        given["shift_labels"] = torch.full_like(
            given["input_ids"], IGNORED, dtype=torch.int64
        )
    recorded = Recorded()
    with recorded.recording():
        token_logprobs(model, given)
    on_ring = next(part for part in model.modules() if isinstance(part, RingCausalLM))
    return recorded.whole(on_ring, given)
