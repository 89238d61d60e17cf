"""Multi-head latent attention of transformers' modules: latents are sent in place of keys and values.

Modules compress a token's keys and values to R numbers and a rotary part of P, and expand both for each of H heads.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.schedule.choice import sends_latents
from ringspan.core.schedule.route import Route
from ringspan.core.step_config import StepConfig
from ringspan.torch.attention.cached import Turn, current_turn
from ringspan.torch.layers.modules import Mixin, mix_in
from ringspan.torch.model.attention.choice import expansion, is_matrix
from ringspan.torch.model.attention.indexed import ChoosingAttention, choosing_modules
from ringspan.torch.runtime.mesh import tensor_axis

_FOR_LONG_HEADS: Final = ("auto", "eager")
"""Kernels that compute with keys as long as a latent."""


class LatentAttention(Mixin):
    ring_absorbs: bool

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents (B, 1, T, R) as keys and the rotary part (B, 1, T, P) as values.

        Over a cache, whose tokens far outnumber the queries, return both as keys and the latents as values.
        """
        turn = current_turn()
        if turn is None:
            return kv_nope, k_rot
        if not absorbs(self, turn):
            return super().expand_kv(kv_nope, k_rot)  # pyright: ignore[reportAttributeAccessIssue]
        return torch.cat((kv_nope, k_rot), -1), kv_nope


def route_of(config: StepConfig, ranks: int) -> Route:
    """Return the route of latents, which ``auto`` sends around the ring."""
    return Route.parse("ring" if config.route == "auto" else config.route, ranks)


def latent_modules(
    decoder: nn.Module, mesh: DeviceMesh, config: StepConfig
) -> list[nn.Module]:
    """Return the modules that send latents: their route sends keys and values, and latents have fewer numbers."""
    ranks = mesh.get_group("ring").size()
    if not sends_latents(
        config, route_of(config, ranks), ranks, has_tp=tensor_axis(mesh) is not None
    ):
        return []
    choosing = {*choosing_modules(decoder)}
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "expand_kv")
        and module not in choosing
        and _is_worth_it(module)
    ]


def _is_worth_it(module: Any) -> bool:
    expanded = module.num_heads * (
        module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim
    )
    return (
        is_matrix(module.kv_b_proj)
        and module.kv_lora_rank + module.qk_rope_head_dim < expanded
    )


def send_latents(modules: Iterable[nn.Module], config: StepConfig) -> None:
    for module in modules:
        mix_in(module, LatentAttention, ring_absorbs=config.kernel in _FOR_LONG_HEADS)


def absorbs(module: object, turn: Turn) -> bool:
    """Return True if queries over a cache are multiplied into latent space: a few tokens, computed on every rank."""
    return (
        isinstance(module, LatentAttention)
        and module.ring_absorbs
        and not turn.is_split
    )


def expansion_of(module: nn.Module, query: Tensor, latents: Tensor) -> Tensor | None:
    """Return the matrix (H, n + v, R) that expands latents; None if the module has expanded them itself."""
    hands_latents = isinstance(module, LatentAttention) or _sends_latents(module)
    return expansion(module, query, latents) if hands_latents else None


def _sends_latents(module: nn.Module) -> bool:
    return isinstance(module, ChoosingAttention) and module.ring_sends_latents


def parts_to_send(
    module: Any, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a module sends if its queries attend to every key they see.

    These are latents and their rotary part; on a route that sends no latents, the expanded keys and values.
    """
    if not hasattr(module, "expand_kv"):
        return key, value
    latents, rotary = key[..., : module.kv_lora_rank], key[..., module.kv_lora_rank :]
    if _sends_latents(module):
        return latents, rotary
    expanded = torch.einsum(
        "btr,hdr->bhtd", latents[:, 0], expansion(module, query, latents)
    )
    nope = module.qk_nope_head_dim
    keys = torch.cat(
        (expanded[..., :nope], rotary.expand(-1, expanded.shape[1], -1, -1)), -1
    )
    return keys, expanded[..., nope:]
