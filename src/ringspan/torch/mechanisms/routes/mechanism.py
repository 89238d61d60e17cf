"""Routes through mixtures of experts, as the base sees them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core import mechanisms
from ringspan.core.errors import UnsupportedError
from ringspan.core.step_config import StepConfig
from ringspan.torch.engine.transport.digest import digest_integers
from ringspan.torch.mechanisms.routes.recording import note_pass, records
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.routing import (
    LIVE,
    ROUTES,
    PassRoutes,
    num_experts,
    route_layers,
)
from ringspan.torch.model.layers.view import ModelView, RingModel, decoder_on_ring
from ringspan.torch.model.local_pass import LocalPass
from ringspan.torch.model.mechanism import Mechanism, Sharding

_INTEGERS: Final = (torch.uint8, torch.int16, torch.int32, torch.int64)


class RoutesMechanism(Mechanism):
    name = mechanisms.ROUTES
    keys = frozenset({ROUTES})
    of_tokens: ClassVar[Mapping[str, int]] = {ROUTES: LIVE}

    def prepare(
        self, view: ModelView, config: StepConfig, mesh: DeviceMesh
    ) -> list[nn.Module]:
        if num_experts(view.decoder.config) and config.compile is False:
            route_layers([*view.layers.values()])
        return []

    def attributes(self, view: ModelView) -> dict[str, Any]:
        return {
            "ring_experts": num_experts(view.decoder.config),
            "ring_routed_layers": len(view.layers),
        }

    def found_in_batch(self, batch: Mapping[str, Any], how: Sharding) -> str:
        return "routes of tokens" if ROUTES in batch else ""

    def added(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Check the routes of a batch of rows, and return their digest."""
        if ROUTES not in batch:
            return {}, []
        routes, tokens = batch[ROUTES], batch["input_ids"]
        if routes.dtype not in _INTEGERS:
            raise UnsupportedError(
                f"routes must be integers, got {routes.dtype}; give the numbers of experts"
            )
        if routes.ndim != 4 or routes.shape[:2] != tokens.shape:
            raise UnsupportedError(
                f"routes have shape {tuple(routes.shape)}, must have {tuple(tokens.shape)} and then layers and experts "
                "of a token"
            )
        return {}, [int(digest_integers(routes.long()))]

    def check(self, model: RingModel, batch: Mapping[str, Any]) -> None:
        """Raise for a model without experts or compiled, and for routes of other layers or experts."""
        routes: Tensor | None = batch.get(ROUTES)
        if routes is None and not records():
            return
        name = class_name(decoder_on_ring(model))
        if not model.ring_experts:
            raise UnsupportedError(
                f"routes: {name} has no mixtures of experts; leave them out"
            )
        if model.ring_compiled:
            raise UnsupportedError(
                "routes: compiled layers do not show their routers' scores; use compile=False"
            )
        if routes is None:
            return
        wanted = (*batch["input_ids"].shape, model.ring_routed_layers)
        if tuple(routes.shape[:-1]) != wanted:
            raise UnsupportedError(
                f"routes have shape {tuple(routes.shape)}, and {name} needs {wanted} and the experts of a token in "
                "all its layers; rs.shard_batch cuts them"
            )
        least, most = (
            (int(each) for each in routes.aminmax()) if routes.numel() else (0, 0)
        )
        if least < LIVE or most >= model.ring_experts:
            raise UnsupportedError(
                f"routes name expert {most if least >= LIVE else least}, and {name} has those from 0 to "
                f"{model.ring_experts - 1}; {LIVE} lets the router choose"
            )

    def begin(self, now: LocalPass) -> None:
        given: Tensor | None = now.given.get(ROUTES)
        if given is None and not records():
            return
        routes = PassRoutes(
            None if given is None else given.flatten(0, 1),
            now.model.ring_experts,
            now.model.ring_routed_layers,
            now.input_ids.numel(),
        )
        now.notes[ROUTES] = routes
        note_pass(routes)
