"""Experts that a layer's tokens go to: chosen by its router, or given and replayed.

Routers of transformers choose by one ``topk`` of scores (tokens, experts). In a pass that has routes, that call returns
the given experts with the scores that they have now, so that weights and gradients come from the live router.
Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.recurrence.current import current_pass
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.modules import Mixin, mix_in

ROUTES: Final = "routes"
"""Name of a pass's routes among its notes, and of a batch's."""
LIVE: Final = -1
"""Entry of a token whose experts the router chooses."""

_COUNTS: Final = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_num_experts",
)
_CHOOSING: Final = frozenset((torch.topk, Tensor.topk))


def num_experts(config: PreTrainedConfig) -> int:
    """Return the experts of each mixture in a model; 0 without any."""
    text = text_config(config)
    counts = (getattr(text, name, None) for name in _COUNTS)
    return max((count for count in counts if isinstance(count, int)), default=0)


class Routing:
    """One layer's choice of experts in one pass over n tokens."""

    def __init__(self, experts: int, given: Tensor | None, tokens: int) -> None:
        """Replay ``given`` (n, K), or let the router choose if it is None or ``LIVE``."""
        self._experts, self._given, self._tokens = experts, given, tokens
        self._rows = slice(0, tokens)
        self._mode: _Mode | None = None
        self._answered = 0
        self._chosen: list[Tensor] = []
        self._live: list[Tensor] = []

    @property
    def chosen(self) -> Tensor | None:
        """The experts (n, K) of all tokens; None if the layer has no router."""
        return torch.cat(self._chosen) if self._chosen else None

    @property
    def live(self) -> Tensor | None:
        """The experts (n, K) that the router itself chose, also where others were given; None without a router."""
        return torch.cat(self._live) if self._live else None

    @contextmanager
    def choosing(self, rows: slice) -> Iterator[None]:
        """Answer the router, which now sees some of the tokens."""
        before, self._rows = self._rows, rows
        try:
            if self._mode is not None:
                yield
                return
            self._mode, self._answered = _Mode(self), 0
            self._chosen, self._live = [], []
            try:
                with self._mode:
                    yield
            finally:
                self._mode = None
        finally:
            self._rows = before

    def is_choice(self, scores: Tensor) -> bool:
        """Return whether scores are of each token now and each expert."""
        tokens = scores.shape[:-1].numel()
        start, stop, _ = self._rows.indices(self._tokens)
        # Scores (n, 1, experts) belong to one group of experts: its best two decide whether the group is chosen.
        is_of_group = scores.ndim > 2 and scores.shape[-2] == 1 < tokens
        return (
            scores.ndim > 1
            and tokens == stop - start
            and scores.shape[-1] >= self._experts
            and not is_of_group
        )

    def answer(self, scores: Tensor, found: Any) -> Any:
        """Return the choice of a router that has ``found`` its own."""
        live = found.indices
        self._answered += live.shape[:-1].numel()
        if self._answered > self._tokens:
            raise UnsupportedError(
                "routes: a layer chooses experts more than once for a token, and routes name one choice of each layer; "
                "leave them out"
            )
        self._live.append(live.detach().flatten(0, -2))
        if self._given is not None:
            given = self._given[self._rows]
            if given.shape[-1] != live.shape[-1]:
                raise UnsupportedError(
                    f"routes name {given.shape[-1]} experts of a token, and a layer chooses {live.shape[-1]}; give "
                    "routes of this model"
                )
            given = given.view(live.shape)
            live = torch.where(given == LIVE, live, given.to(live.dtype))
            found = torch.return_types.topk((scores.gather(-1, live), live))
        self._chosen.append(live.detach().flatten(0, -2))
        return found


class _Mode(TorchFunctionMode):
    """Sees each call of a torch function within a layer, and answers a router's choice."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self._routing = routing

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _CHOOSING:
            return found
        scores = args[0] if args else kwargs["input"]
        if not self._routing.is_choice(scores):
            return found
        return self._routing.answer(scores, found)


class PassRoutes:
    """Routes of a pass over n local tokens: what is given, and what its layers chose."""

    def __init__(
        self, given: Tensor | None, experts: int, layers: int, tokens: int
    ) -> None:
        """Take the routes ``given`` (n, layers, K), or let the routers choose."""
        self._given, self._experts, self._tokens = given, experts, tokens
        self._chosen: list[Tensor | None] = [None] * layers
        self._live: list[Tensor | None] = [None] * layers

    @contextmanager
    def of_layer(self, number: int) -> Iterator[None]:
        """Answer a layer's router, also where its feed-forward is computed again in backward."""
        given = None if self._given is None else self._given[:, number]
        routing = Routing(self._experts, given, self._tokens)
        token = _routing.set(routing)
        try:
            with routing.choosing(slice(0, self._tokens)):
                yield
        finally:
            _routing.reset(token)
        self._chosen[number], self._live[number] = routing.chosen, routing.live
        is_last = number == len(self._chosen) - 1
        if (
            is_last
            and self._given is not None
            and not any(map(_is_there, self._chosen))
        ):
            raise UnsupportedError(
                "routes: no layer of this model chooses experts by their scores; leave them out"
            )

    @property
    def chosen(self) -> Tensor | None:
        """The experts (n, layers, K), ``LIVE`` for layers that choose none; None if no layer does."""
        return _of_layers(self._chosen)

    @property
    def live(self) -> Tensor | None:
        """The same, as the routers themselves chose, also where other experts were given."""
        return _of_layers(self._live)


def _of_layers(chosen: Sequence[Tensor | None]) -> Tensor | None:
    some = next(filter(_is_there, chosen), None)
    if some is None:
        return None
    for each in chosen:
        if each is not None and each.shape != some.shape:
            raise UnsupportedError(
                f"routes: a layer chooses {each.shape[-1]} experts of a token and another one {some.shape[-1]}; leave "
                "them out"
            )
    nothing = torch.full_like(some, LIVE)
    return torch.stack([nothing if each is None else each for each in chosen], 1)


def _is_there(chosen: Tensor | None) -> bool:
    return chosen is not None


_routing: ContextVar[Routing | None] = ContextVar("routing", default=None)


def current_routing() -> Routing | None:
    """Return the routing of the layer that runs; None in a pass without routes."""
    return _routing.get()


class Routed(Mixin):
    """A decoder layer whose router may be answered by the routes of a pass."""

    ring_layer_number: int

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        layer: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        now = current_pass()
        routes: PassRoutes | None = (
            _off_rings.get() if now is None else now.notes.get(ROUTES)
        )
        if routes is None:
            return layer(*args, **kwargs)
        with routes.of_layer(self.ring_layer_number):
            return layer(*args, **kwargs)


_off_rings: ContextVar[PassRoutes | None] = ContextVar("off_rings", default=None)


@contextmanager
def answering(routes: PassRoutes) -> Iterator[None]:
    """Answer the routers of routed layers in passes of a model that is on no ring."""
    token = _off_rings.set(routes)
    try:
        yield
    finally:
        _off_rings.reset(token)


def route_layers(layers: Sequence[nn.Module]) -> None:
    """Let passes answer the routers of decoder layers, in place."""
    for number, layer in enumerate(layers):
        mix_in(layer, Routed, ring_layer_number=number)
