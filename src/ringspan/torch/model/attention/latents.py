"""Multi-head latent attention of transformers' modules: latents are sent in place of keys and values.

Modules compress a token's keys and values to R numbers and a rotary part of P, and expand both for each of H heads.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.schedule.choice import sends_latents
from ringspan.core.schedule.route import Route
from ringspan.core.step_config import StepConfig
from ringspan.torch.engine.attention.cached import Turn, current_turn
from ringspan.torch.model.layers.modules import Mixin, computes_as, mix_in
from ringspan.torch.model.weights.packed import is_packed
from ringspan.torch.runtime.mesh import tensor_axis

_FOR_LONG_HEADS: Final = ("auto", "eager")
"""Kernels that compute with keys as long as a latent."""


class HandsLatents(Mixin):
    """A module that hands latents to the attention function, and not the keys and values of its heads."""

    ring_hands_latents = True


class LatentAttention(HandsLatents):
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
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "expand_kv")
        and not isinstance(module, HandsLatents)
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
    return expansion(module, query, latents) if hands_latents(module) else None


def hands_latents(module: nn.Module) -> bool:
    return isinstance(module, HandsLatents) and module.ring_hands_latents


def absorbed_attention(
    module: Any, query: Tensor, latents: Tensor, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return attention (B, H, T, v) of queries (B, H, T, n + P) that ``attend`` to latents, absorbed."""
    matrix, nope = expansion(module, query, latents), module.qk_nope_head_dim
    absorbed = torch.einsum("bhtn,hnr->bhtr", query[..., :nope], matrix[:, :nope])
    out = attend(torch.cat((absorbed, query[..., nope:]), -1))
    return torch.einsum("bhtr,hvr->bhtv", out, matrix[:, nope:])


def is_matrix(projection: Any) -> bool:
    """Return whether a projection, adapters included, computes a product with one matrix."""
    parts = [*projection.modules()]
    is_lora = not hasattr(projection, "base_layer") or type(
        projection
    ).__module__.startswith("peft.tuners.lora")
    # Some variants of LoRA compute with the tokens themselves.
    if not is_lora or getattr(projection, "lora_variant", None):
        return False
    # 8-bit projections of bitsandbytes round their inputs as well.
    is_rounded = any(hasattr(getattr(part, "weight", None), "SCB") for part in parts)
    has_more = any(
        getattr(part, "bias", None) is not None or getattr(part, "p", 0)
        for part in parts
    )
    return not is_rounded and not has_more


def expansion(module: Any, query: Tensor, latents: Tensor) -> Tensor:
    """Return the matrix (H, n + v, R) that turns latents into keys and values of queries' heads, adapters included."""
    matrix = module.kv_b_proj
    if computes_as(matrix, nn.Linear) and not is_packed(matrix.weight):
        matrix = matrix.weight
    else:
        matrix = matrix(
            torch.eye(module.kv_lora_rank, dtype=latents.dtype, device=latents.device)
        ).T
    return matrix.unflatten(0, (query.shape[1], -1))
