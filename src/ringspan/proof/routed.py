"""Experts of each token in a proof: as one process in float64 chooses them, in narrower dtypes too.

Rounding sends some tokens to other experts, on a ring to other ones than on one process: large differences without a
mistake. So all passes of a narrower dtype go the routes of float64, with weights of their own scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from torch import Tensor, nn

from ringspan.proof.batches import Batch
from ringspan.proof.trial import Trial
from ringspan.torch.model.adapters import base_of
from ringspan.torch.model.layers.decoder import decoder_of, layers_of
from ringspan.torch.model.layers.routing import (
    LIVE,
    PassRoutes,
    answering,
    num_experts,
    route_layers,
)

EVALUATION: Final = -1
"""Number of the pass that evaluates, the last one of a run."""


class PlainRoutes:
    """Routes of a plain model, pass by pass: what its routers choose, and what they are given in place of it."""

    def __init__(
        self, model: nn.Module, batch: Batch, given: Sequence[Tensor] | None
    ) -> None:
        """Let the layers of a model answer with the routes ``given`` (B, S, layers, K) of each pass, or live."""
        base: Any = base_of(model)
        layers = [*layers_of(decoder_of(base)).values()]
        route_layers(layers)
        self._given, self._batch, self._layers = given, batch, len(layers)
        self._experts = num_experts(base.config)
        self.live: list[Tensor] = []
        """What the routers themselves chose in each pass (B, S, layers, K), ``LIVE`` for padding."""

    @contextmanager
    def passing(self, number: int) -> Iterator[None]:
        """Begin a pass over all parts of the batch, the ``number``-th of a run."""
        self._now = None if self._given is None else self._given[number]
        self._found = list[Tensor | None]()
        yield
        whole: Tensor | None = None
        for (row, places), part in zip(self._batch.parts, self._found, strict=True):
            if part is None:  # no layer chooses by scores
                continue
            if whole is None:
                size = self._batch.inputs["input_ids"].shape
                whole = part.new_full((*size, *part.shape[1:]), LIVE)
            whole[row, list(places)] = part
        if whole is not None:
            self.live.append(whole)

    @contextmanager
    def part(self, row: int, places: Sequence[int]) -> Iterator[None]:
        """Answer the routers of the layers that read a part of the batch."""
        given = None if self._now is None else self._now[row, list(places)]
        routes = PassRoutes(given, self._experts, self._layers, len(places))
        with answering(routes):
            yield
        self._found.append(routes.live)


class LiveRoutes:
    """No routes: routers choose, and their choice is not kept."""

    live: Sequence[Tensor] = ()

    def passing(self, _: int) -> Any:
        return nullcontext()

    def part(self, _: int, __: Sequence[int]) -> Any:
        return nullcontext()


def has_experts(trial: Trial) -> bool:
    """Return whether layers of a model choose experts for their tokens."""
    return bool(num_experts(trial.subject.config))


def why_live(trial: Trial, batch: Batch) -> str:
    """Return why a ring cannot be given routes for a batch; empty if it can."""
    if batch.is_tree:
        return "a tree's token is one of several rows"
    if trial.options.get("compile", False) is not False:
        return "compiled layers do not show their routers' scores"
    return ""


def share_elsewhere(found: Tensor, expected: Tensor) -> float:
    """Return the share of choices of a token in a layer (B, S, layers, K) that name other experts."""
    is_choice = (expected != LIVE).all(-1)
    apart = (found.long().sort(-1).values != expected.long().sort(-1).values).any(-1)
    return float(apart[is_choice].double().mean()) if is_choice.any() else 0.0
