"""Layers whose queries attend to the keys that an index chooses: DeepSeek-V3.2 and its kin (DSA over MLA).

Transformers' attention hands latents, compressed keys and values of all heads, to ``expand_kv``, and its index's choice
to the attention function. Here queries are taken to the latents (absorbed), so that ranks send 576 numbers of a token
instead of 128 heads' keys and values. The index returns its inputs, since it chooses among the keys of all ranks.
R numbers of a latent, n and v of a head's key (without its rotary part) and value.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError
from ringspan.core.step_config import StepConfig
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Choice,
    everything,
    rotation_of,
)
from ringspan.torch.mechanisms.chosen_keys.chosen import IndexInputs
from ringspan.torch.mechanisms.chosen_keys.index_loss import (
    learning_queries,
    refuse_index_loss,
)
from ringspan.torch.model.attention.latents import (
    HandsLatents,
    expansion,
    hands_latents,
    is_matrix,
)
from ringspan.torch.model.layers.cache_names import given_cache
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import Mixin, mix_in
from ringspan.torch.model.layers.view import ModelView


class ChoosingAttention(HandsLatents):
    # If queries attend to every key they see, latents are sent only where the route takes them.

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents with their rotary part (B, 1, T, R + P), as keys and as values."""
        latents = torch.cat((kv_nope, k_rot), -1)
        return latents, latents

    def build_attention_mask_from_topk(
        self, topk_indices: object, **_: object
    ) -> object:
        """Return the choice, which GLM-5-Next passes on as a mask."""
        return topk_indices


class Index(Mixin):
    ring_rotates_last: bool
    """True if positions turn the last numbers of a head, not the first."""
    key_numbers = property(lambda self: self.head_dim)
    """Numbers of a token that ranks send, and that a cache keeps, for the index."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: object,
        **named: Any,
    ) -> Choice:
        """Compute queries, keys and weights as transformers' index does; over a cache, its share of the keys."""
        if (all_ := everything(hidden_states, self.index_topk)) is not None:
            return all_
        with torch.set_grad_enabled(learning_queries() is not None):
            q = self.wq_b(q_resid.detach()).unflatten(-1, (self.n_heads, self.head_dim))
            return self.ring_choice(
                q, hidden_states.detach(), position_embeddings, given_cache(named)
            )

    def ring_choice(
        self: Any,
        q: Tensor,
        hidden_states: Tensor,
        turns: tuple[Tensor, Tensor] | None,
        cache: Any,
    ) -> Choice:
        """Return an index's inputs, given queries (B, T, H, D): rotated queries and keys, and head weights (B, T, H).

        ``turns``: cosines and sines, None if the index uses no positions. Keys (B, T, D) are the local tokens'; over a
        cache they are added to it, and this rank's whole share takes their place.
        """
        k = (
            self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype))
            .to(hidden_states.dtype)
            .unsqueeze(2)
        )
        if turns is not None:
            rotary, plain = self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim
            is_last = self.ring_rotates_last
            parts = [
                x.split([plain, rotary] if is_last else [rotary, plain], -1)
                for x in (q, k)
            ]
            turned = rotation_of(self)(
                *(x[is_last] for x in parts), *turns, unsqueeze_dim=2
            )
            q, k = (
                torch.cat((rest[0], new) if is_last else (new, rest[1]), -1)
                for rest, new in zip(parts, turned, strict=True)
            )
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
        weights = (
            weights.to(torch.promote_types(weights.dtype, torch.float32))
            * self.n_heads**-0.5
        )
        k = (
            k.squeeze(2)
            if cache is None
            else cache.update_indexer(k.squeeze(2), self.layer_idx)
        )
        return Choice(
            IndexInputs(
                q, k, weights, self.softmax_scale, self.index_topk, learning_queries()
            ),
            [],
        )


def choosing_modules(decoder: Any) -> list[nn.Module]:
    if not family_of(decoder.config).has_own_layers(decoder.config):
        return []
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "layer_idx") and _chooses(module)
    ]


def _chooses(module: Any) -> bool:
    parts = (getattr(module, name, None) for name in ("indexer", "compressor"))
    return any(part is not None for part in parts) or getattr(
        module, "skip_topk", False
    )


def refuse_indexed(view: ModelView, config: StepConfig, tp: int) -> None:
    """Raise UnsupportedError for options that layers with an index do not take."""
    modules = choosing_modules(view.decoder)
    refuse_index_loss(view, config, modules)
    if not modules:
        return
    name = f"{view.name} chooses its keys by an index"
    if tp > 1:
        raise UnsupportedError(f"{name}, whose heads tp does not split yet; use tp=1")
    if config.compile is not False:
        raise UnsupportedError(
            f"compile={config.compile!r}: {name} among those of all ranks; use compile=False"
        )
    if not config.sent_as.is_exact:
        raise UnsupportedError(
            f"{config.sent_as.option}: {name}, and other keys would win; use exact"
        )
    if config.kernel not in ("auto", "eager"):
        raise UnsupportedError(
            f"kernel={config.kernel!r}: {name}, for which it has no code; use auto"
        )
    if not getattr(view.decoder.config, "index_kpool_always_select_tail", True):
        raise UnsupportedError(
            f"index_kpool_always_select_tail=False: {name}, and the first tokens of a document would see none; set it "
            "to True in the model's config"
        )
    for module in (each for each in modules if hasattr(each, "expand_kv")):
        projection: Any = module.kv_b_proj
        if not is_matrix(projection):
            raise UnsupportedError(
                f"{name}: its latents are expanded (kv_b_proj) by more than a matrix (a bias, dropout, 8 bits or an "
                "adapter that is more than LoRA), which absorbed queries leave out; use lora_dropout=0, or leave "
                "kv_b_proj out of the adapter"
            )


def take_over_index(
    decoder: Any, modules: Iterable[Any], *, sends_latents: bool = True
) -> None:
    """Put mixins before the modules of an index and its attention, so that a ring chooses and fetches the keys."""
    index = family_of(decoder.config).index
    for module in modules:
        assert index is not None, "these modules are of its family"
        if hasattr(module, "expand_kv"):
            mix_in(module, ChoosingAttention, ring_hands_latents=sends_latents)
        if getattr(module, "compressor", None) is not None:
            mix_in(module.compressor, index.mixin or Index)
        elif module.indexer is not None:
            rotates_last = index.rotates_last
            mix_in(module.indexer, index.mixin or Index, ring_rotates_last=rotates_last)
    for module in decoder.modules() if modules else ():
        for name, mixin in () if index is None else index.parts.items():
            if hasattr(module, name):
                mix_in(module, mixin)


def parts_to_send(
    module: Any, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a module sends if its queries attend to every key they see.

    These are latents and their rotary part; on a route that sends no latents, the expanded keys and values.
    """
    if not hasattr(module, "expand_kv"):
        return key, value
    latents, rotary = key[..., : module.kv_lora_rank], key[..., module.kv_lora_rank :]
    if hands_latents(module):
        return latents, rotary
    expanded = torch.einsum(
        "btr,hdr->bhtd", latents[:, 0], expansion(module, query, latents)
    )
    nope = module.qk_nope_head_dim
    keys = torch.cat(
        (expanded[..., :nope], rotary.expand(-1, expanded.shape[1], -1, -1)), -1
    )
    return keys, expanded[..., nope:]
