"""Which Hugging Face models the ring can run exactly: what their configs say, and what is refused by name."""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ringspan.core.errors import UnsupportedError
from ringspan.core.route import Route, member_heads
from ringspan.torch.rope import is_rotary
from ringspan.torch.wire import check_wire

# Config fields that change attention or logits in a way that the ring does not compute yet.
_UNSUPPORTED_FIELDS: Final = (
    "attention_dropout",
    "attn_pdrop",
    "output_router_logits",
)
# RoPE types whose frequencies depend on the largest position of the sequence.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise an UnsupportedError that names what this model asks for and the ring does not compute exactly."""
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError(f"{name} does not route its attention through transformers' AttentionInterface")
    if model.get_output_embeddings() is None or decoder_name(model) is None:
        raise UnsupportedError(f"{name} is not a causal language model with a head; use an AutoModelForCausalLM")
    refuse_config(model.config)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            raise UnsupportedError(f"{name} mixes tokens outside of attention ({path} is a convolution)")
    for rope in _rope_types(model.config):
        if rope in _LENGTH_DEPENDENT_ROPE and not any(is_rotary(module) for module in model.modules()):
            raise UnsupportedError(
                f"{name}: rope_type={rope!r} chooses frequencies by the length of the sequence, which its rotary "
                "embedding cannot be told; use default, linear, llama3 or yarn"
            )
    _check_head(model)


def refuse_config(config: PreTrainedConfig) -> None:
    """Raise an UnsupportedError that names the config field which asks for more than causal attention."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{kind} is an encoder-decoder model; only decoder-only causal models are supported")
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        raise UnsupportedError(f"{kind}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        raise UnsupportedError(f"{kind}: layer_types with {', '.join(others)} are not supported yet")
    for field in _UNSUPPORTED_FIELDS:
        value = getattr(config, field, None)
        if value:
            raise UnsupportedError(f"{kind}: {field}={value} is not supported yet; set it to None or 0")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedError(f"{kind}: bidirectional attention is not supported yet")


def refuse_route(config: PreTrainedConfig, ranks: int, route: str, wire: str, tp: int = 1) -> None:
    """Raise an UnsupportedError when a route or wire does not exist, or does not fit the ring and the heads that each
    of ``tp`` ranks has.
    """
    check_wire(wire, "exact")
    if route == "auto":
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    way = Route.parse(route, ranks)
    member_heads(heads // tp, kv_heads // tp, way.ulysses)
    way.check_wire(wire)


class LayerKind(NamedTuple):
    """Whom a layer's queries see: everything before them, the last ``window`` keys, or their own chunk."""

    window: int | None = None
    chunk: int | None = None


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """What the config says of each layer's attention."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    of_type = {
        "full_attention": LayerKind(),
        "sliding_attention": LayerKind(window=window),
        "chunked_attention": LayerKind(chunk=getattr(config, "attention_chunk_size", None)),
    }
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(of_type[kind] for kind in types)


def _rope_types(config: PreTrainedConfig) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return [str(each.get("rope_type", "default")) for each in (rope, *nested)]


def _check_head(model: PreTrainedModel) -> None:
    """Refuse a model that does more with its hidden states than apply its head (scales or caps logits, say).

    Runs the model's own forward on one made-up hidden state in place of the decoder and compares.
    """
    head: Any = model.get_output_embeddings()
    if head.weight.is_meta:
        return
    hidden = torch.randn(1, 1, head.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(head.weight)
    kind, name = type(model).__name__, decoder_name(model) or ""
    decoder = getattr(model, name)
    setattr(model, name, _Decoder(hidden))
    try:
        with torch.no_grad():
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
            expected = capped(head(hidden), getattr(model.config, "final_logit_softcapping", None))
            same = torch.equal(model(input_ids=tokens).logits, expected)
    except AttributeError as error:
        raise UnsupportedError(f"{kind} reaches into its decoder, which is not supported yet") from error
    finally:
        setattr(model, name, decoder)
    if not same:
        raise UnsupportedError(f"{kind} changes its logits after the head, which is not supported yet")


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap tanh(logits / softcap)``, as Gemma 2 does; the logits themselves without one."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def decoder_name(model: PreTrainedModel) -> str | None:
    """The attribute that holds the decoder, a model of its own beside the head."""
    return next((name for name, child in model.named_children() if isinstance(child, PreTrainedModel)), None)


class _Decoder(nn.Module):
    """Stands in for a decoder: always the same hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)
