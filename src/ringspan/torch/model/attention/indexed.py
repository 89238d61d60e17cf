"""Layers whose queries attend to the keys that an index chooses: DeepSeek-V3.2 and its kin (DSA over MLA).

Transformers' attention hands latents, compressed keys and values of all heads, to ``expand_kv``, and its index's choice
to the attention function. Here queries are taken to the latents (absorbed), so that a token's 576 numbers travel
instead of 128 heads' keys and values; the index gives its inputs, since its choice is among the keys of all ranks.
R numbers of a latent, n and v of a head's key (without its rotary part) and value.
"""

import inspect
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import Mask
from ringspan.core.names import LayoutName
from ringspan.core.step_config import StepConfig
from ringspan.torch.attention.chosen import IndexInputs
from ringspan.torch.attention.indexed import indexed_attention
from ringspan.torch.layers.decoder import has_index
from ringspan.torch.layers.modules import Mixin, computes_as, forward_of, mix_in
from ringspan.torch.layers.view import ModelView
from ringspan.torch.weights.packed import is_packed

_ROTARY_LAST: Final = frozenset({"hy_v4"})
"""Types whose index rotates the last numbers of a head, not the first."""
_ROTATIONS: Final = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")


class Rows(NamedTuple):
    part: slice
    mask: Mask
    layout: LayoutName | Layout


class Choice:
    """Inputs of an index, then its choice, on their way through this layer and those that share it."""

    def __init__(self, index: IndexInputs) -> None:
        self.index: IndexInputs | None = index
        self.chosen: list[Tensor] = []
        """Choice of each ``Rows``: global positions, int32 (B, T, k), -1 for none."""


class ChoosingAttention(Mixin):
    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents with their rotary part (B, 1, T, R + P), as keys and as values."""
        latents = torch.cat((kv_nope, k_rot), -1)
        return latents, latents


class _Index(Mixin):
    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: object,
        **__: object,
    ) -> Choice:
        """Compute queries, keys and weights as transformers' index does."""
        q = self.wq_b(q_resid).view(*hidden_states.shape[:2], self.n_heads, self.head_dim)
        k = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
        rotary, plain = self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim
        is_last = self.config.model_type in _ROTARY_LAST
        parts = [x.split([plain, rotary] if is_last else [rotary, plain], -1) for x in (q, k)]
        turned = _rotation_of(self)(*(x[is_last] for x in parts), *position_embeddings, unsqueeze_dim=2)
        q, k = (
            torch.cat((rest[0], new) if is_last else (new, rest[1]), -1)
            for rest, new in zip(parts, turned, strict=True)
        )
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
        return Choice(IndexInputs(q, k.squeeze(2), weights, self.softmax_scale, self.index_topk))


def _rotation_of(index: nn.Module) -> Any:
    code: Any = inspect.unwrap(forward_of(index))
    return next(code.__globals__[name] for name in _ROTATIONS if name in code.__code__.co_names)


def choosing_modules(decoder: Any) -> list[nn.Module]:
    if not has_index(decoder.config):
        return []
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "expand_kv") and (module.indexer is not None or getattr(module, "skip_topk", False))
    ]


def refuse_indexed(view: ModelView, config: StepConfig, tp: int) -> None:
    """Raise UnsupportedError for options that layers with an index do not take."""
    modules = choosing_modules(view.decoder)
    if not modules:
        return
    name = f"{view.name} chooses its keys by an index"
    if tp > 1:
        raise UnsupportedError(f"{name}, whose heads tp does not split yet; use tp=1")
    if config.compile is not False:
        raise UnsupportedError(f"compile={config.compile!r}: {name} among those of all ranks; use compile=False")
    if config.comm_dtype != "exact":
        raise UnsupportedError(f"comm_dtype={config.comm_dtype!r}: {name}, and other keys would win; use exact")
    if config.kernel not in ("auto", "eager"):
        raise UnsupportedError(f"kernel={config.kernel!r}: {name}, for which it has no code; use auto")
    module: Any
    for module in modules:
        if not is_matrix(module.kv_b_proj):
            raise UnsupportedError(
                f"{name}: its latents are expanded (kv_b_proj) by more than a matrix (a bias, dropout, 8 bits or an "
                "adapter that is more than LoRA), which absorbed queries leave out; use lora_dropout=0, or leave "
                "kv_b_proj out of the adapter"
            )


def take_over_index(modules: Iterable[Any]) -> None:
    for module in modules:
        mix_in(module, ChoosingAttention)
        if module.indexer is not None:
            mix_in(module.indexer, _Index)


def attend_to_chosen(
    module: nn.Module,
    query: Tensor,
    latents: Tensor,
    choice: Choice,
    rows: list[Rows],
    ring: dist.ProcessGroup,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention (B, T, H, v) of queries (B, H, T, n + P), and keep in ``choice`` what they chose."""
    rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
    matrix = expansion(module, latents).unflatten(0, (query.shape[1], -1))  # (H, n + v, R)
    absorbed = torch.einsum("bhtn,hnr->bhtr", query[..., :nope], matrix[:, :nope])
    q = torch.cat((absorbed, query[..., nope:]), -1)
    index, chosen = choice.index, choice.chosen
    length = query.shape[2] * dist.get_world_size(ring)
    outs: list[Tensor] = []
    for number, (part, mask, layout) in enumerate(rows):
        of_rows = None
        if index is not None:
            q_index, k_index, weights = (x[part] for x in index[:3])
            of_rows = IndexInputs(q_index, k_index, weights, index.scale, min(index.topk, length))
        out, found = indexed_attention(
            q[part],
            latents[part, 0],
            of_rows,
            None if index is not None else chosen[number],
            values=slice(0, rank),
            scale=scale,
            mask=mask,
            layout=layout,
            group=ring,
            sinks=sinks,
        )
        outs.append(out)
        if index is not None:
            chosen.append(found)
    choice.index = None
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return torch.einsum("bhtr,hvr->bthv", out, matrix[:, nope:])


def is_matrix(projection: Any) -> bool:
    """Return whether a projection, adapters included, computes a product with one matrix."""
    parts = [*projection.modules()]
    is_lora = not hasattr(projection, "base_layer") or type(projection).__module__.startswith("peft.tuners.lora")
    if not is_lora or getattr(projection, "lora_variant", None):  # some look at tokens
        return False
    # Of 8 bits, inputs are rounded as well.
    is_rounded = any(hasattr(getattr(part, "weight", None), "SCB") for part in parts)
    has_more = any(getattr(part, "bias", None) is not None or getattr(part, "p", 0) for part in parts)
    return not is_rounded and not has_more


def expansion(module: Any, latents: Tensor) -> Tensor:
    """Return the matrix (H (n + v), R) that turns latents into keys and values, adapters included."""
    projection = module.kv_b_proj
    if computes_as(projection, nn.Linear) and not is_packed(projection.weight):
        return projection.weight
    rows = torch.eye(module.kv_lora_rank, dtype=latents.dtype, device=latents.device)
    return projection(rows).T
