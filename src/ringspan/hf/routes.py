"""Routes through experts of the rows that a generation made, kept for the passes that train on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ringspan.core.errors import ConfigError
from ringspan.hf.config import RingConfig
from ringspan.torch.mechanisms.routes.recording import Recorded
from ringspan.torch.model.adapters import base_of
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.routing import LIVE, ROUTES


class KeptRoutes:
    """Routes (tokens, layers, K) of whole rows, found again by their tokens: trainers shuffle and split rows."""

    def __init__(self, *, records: bool) -> None:
        """Keep no row yet; with ``records``, the first pass over a row says which experts it chose."""
        self.records = records
        self._rows: dict[bytes, Tensor] = {}

    def begin(self) -> None:
        """Forget the rows of the generation before."""
        self._rows.clear()

    def keep(self, tokens: Sequence[int], routes: Tensor) -> None:
        """Keep the routes of a row's first tokens; the last one of an answer was never computed."""
        self._rows[_key(np.asarray(tokens))] = routes

    def keep_batch(self, batch: Mapping[str, Any], routes: Tensor) -> None:
        """Keep the routes (B, S, layers, K) of a batch's rows, without padding."""
        for (row, real), each in zip(_rows_of(batch), routes, strict=True):
            self._rows[_key(row)] = each[real].to(torch.int16).cpu()

    def routes_of(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the routes (B, S, layers, K) of a batch, ``LIVE`` where none are known; None without any."""
        found = [(self._rows.get(_key(row)), real) for row, real in _rows_of(batch)]
        some = next((routes for routes, _ in found if routes is not None), None)
        if some is None:
            return None
        shape = (*batch["input_ids"].shape, *some.shape[1:])
        whole = torch.full(shape, LIVE, dtype=torch.int16)
        for row, (routes, real) in zip(whole, found, strict=True):
            if routes is not None:
                row[real.nonzero().flatten()[: len(routes)]] = routes.to(torch.int16)
        return whole.to(batch["input_ids"].device)


def _rows_of(batch: Mapping[str, Any]) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield each row's tokens without padding, and the places of them."""
    ids = batch["input_ids"].cpu()
    mask = batch.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else mask.cpu()
    for row, here in zip(ids, real.bool(), strict=True):
        yield row[here].numpy(), here


def _key(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int64).tobytes()


def keep_routes(trainer: Any, ring: RingConfig) -> None:
    """Let a trainer's model keep routes as ``replay_routes`` says; ConfigError if it cannot."""
    source = ring.replay_routes
    if source is None:
        return
    asked = f"replay_routes={source!r}"
    if not (hasattr(trainer, "num_generations") and hasattr(trainer, "reward_funcs")):
        raise ConfigError(
            f"{asked} is for trainers that generate (GRPO, RLOO); leave it out"
        )
    model: Any = base_of(trainer.model)
    if not model.ring_experts:
        raise ConfigError(
            f"{asked}: {class_name(model)} has no mixtures of experts; leave it out"
        )
    generation = getattr(trainer, "vllm_generation", None)
    if source == "rollout" and generation is None:
        raise ConfigError(
            f"{asked} takes the routes that vLLM returns; set use_vllm=True, or use 'old'"
        )
    kept = model.ring_kept_routes = KeptRoutes(records=source == "old")
    if generation is not None:
        generation.ring_kept_routes = kept


def begin_routes(model: nn.Module) -> None:
    """Forget the routes of the last generation, when a trained one begins."""
    base: Any = base_of(model)
    if base.ring_kept_routes is not None and base.training:
        base.ring_kept_routes.begin()


@contextmanager
def routed(
    model: Any, whole: dict[str, Any]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Add to a whole batch the routes that its rows have, or record them; yield what keeps them after the pass."""
    kept: KeptRoutes | None = model.ring_kept_routes
    if kept is None or not model.training or _is_reference(model):
        yield lambda _: None
        return
    routes = kept.routes_of(whole)
    if routes is not None:
        whole[ROUTES] = routes
    if routes is not None or torch.is_grad_enabled() or not kept.records:
        yield lambda _: None
        return
    recorded = Recorded()
    with recorded.recording():
        yield lambda local: kept.keep_batch(whole, recorded.whole(model, local))


def _is_reference(model: nn.Module) -> bool:
    """Return whether an adapter is off, or PEFT's copy of it called ``ref`` is active: a pass of the reference."""
    for part in model.modules():
        switch = vars(part).get("_disable_adapters")
        active = vars(part).get("_active_adapter")
        if switch or active in ("ref", ["ref"]):
            return True
    return False
