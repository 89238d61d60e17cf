"""Checks, by config and by trial, that the ring runs a Hugging Face model exactly; other models raise."""

import inspect
import logging
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ringspan.core.errors import UnsupportedError
from ringspan.core.schedule.route import Route, member_heads
from ringspan.core.step_config import StepConfig
from ringspan.torch.engine import kernels
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.model.attention.support import refuse_attention
from ringspan.torch.model.layers.blockwise.head import (
    current_copy,
    input_size,
    joined,
    refuse_mixing,
)
from ringspan.torch.model.layers.decoder import (
    STATEFUL_LAYERS,
    finished_logits,
    has_attention,
    head_counts,
    head_sizes,
    logit_scale,
    logit_softcap,
    text_config,
)
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import instead
from ringspan.torch.model.layers.positions import refuse_rope_by_length
from ringspan.torch.model.layers.rope import is_rotary
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.recurrent import refuse_stateful
from ringspan.torch.model.splittable import DEQUANTISE, refuse_weights
from ringspan.torch.model.weights.loading import filled, named_in, refuse_not_finite

_log: Final = logging.getLogger(__name__)

# Config fields that change attention or outputs in a way that the ring does not compute yet.
UNSUPPORTED_FIELDS: Final = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "output_attentions", "output_hidden_states",
)  # fmt: skip


class FoundHead(NamedTuple):
    """Path from a decoder's last hidden states to logits."""

    parts: tuple[str, ...] = ()
    """Modules in order; empty if it is only the output embedding."""
    shifts: bool = True
    """True if the model's own loss shifts the labels."""
    scale: float = 1.0
    softcap: float | None = None
    """Limit on the logits (``finished_logits``)."""


def refuse_unsupported(view: ModelView) -> FoundHead:
    """Return the model's head; raise UnsupportedError for anything the ring does not compute exactly."""
    if view.head is None or view.decoder is view.model:
        refuse_config(view.model.config)
        raise UnsupportedError(
            f"{view.name} is not a causal language model with a head; use an AutoModelForCausalLM"
        )
    refuse_unsupported_decoder(view)
    return _find_head(view, view.head)


def refuse_unsupported_decoder(view: ModelView) -> None:
    name, model, decoder = view.name, view.model, view.decoder
    refuse_config(model.config)
    refuse_weights(model)
    _refuse_own_tower(name, decoder)
    refuse_stateful(view)
    if has_attention(decoder.config):
        refuse_attention(view)
    if not any(is_rotary(module) for module in decoder.modules()):
        refuse_rope_by_length(
            name, decoder.config, "its rotary embedding cannot be told"
        )


@torch.no_grad()
def _refuse_own_tower(name: str, decoder: PreTrainedModel) -> None:
    if not decoder.config.sub_configs:
        return
    with filled(decoder, zeros=True):
        try:
            decoder(
                input_ids=torch.zeros(1, 2, dtype=torch.int64, device=decoder.device),
                use_cache=False,
            )
        except Exception as error:
            raise UnsupportedError(
                f"{name} needs more than tokens ({_first_line(error)}), which a ring does not give its decoder; use a "
                "model that runs on text alone"
            ) from error


def refuse_quantised(config: PreTrainedConfig) -> None:
    """Raise UnsupportedError for quantised files; a model built from only the config has plain weights."""
    if (packed := getattr(config, "quantization_config", None)) is not None:
        values = packed if isinstance(packed, dict) else packed.to_dict()
        if values.get("quant_method") == "torchao":
            raise UnsupportedError(
                f"{config.model_type} is quantised (torchao), and packed weights are not read in parts; open it with "
                "from_pretrained of transformers, add an adapter (PEFT), and use rs.parallelize"
            )
        raise UnsupportedError(
            f"{config.model_type} is quantised ({values.get('quant_method')}), and packed weights cannot be split over "
            f"ranks; {DEQUANTISE}"
        )


def refuse_config(config: PreTrainedConfig) -> None:
    """Raise UnsupportedError for a config field that asks for more than causal attention."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"{kind} is an encoder-decoder model; use a decoder-only causal model"
        )
    media, config = family_of(config).media, text_config(config)
    for heads, kv_heads in set(head_counts(config)):
        if heads % kv_heads:
            raise UnsupportedError(
                f"{kind}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}; correct it"
            )
    known = {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "attention",
        "moe",
        "mlp",
        *STATEFUL_LAYERS,
        *family_of(config).layer_types,
    }
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        raise UnsupportedError(
            f"{kind}: layer_types with {', '.join(others)} are not supported; see docs/models.md"
        )
    for field in UNSUPPORTED_FIELDS:
        value = getattr(config, field, None)
        if value:
            raise UnsupportedError(
                f"{kind}: {field}={value} is not supported yet; set it to None or 0"
            )
    # "vision" lets tokens of images see later ones; these models take no images on a ring. Models with a prefix
    # (PaliGemma) set it too, and mark the tokens that see later ones by their types.
    asked = getattr(config, "use_bidirectional_attention", None)
    has_prefix = media is not None and media.is_prefix
    sees_later = asked not in (None, False, "vision") and not has_prefix
    if not getattr(config, "is_causal", True) or sees_later:
        raise UnsupportedError(
            f"{kind}: bidirectional attention is not supported yet; see docs/models.md"
        )


def refuse_route(
    config: PreTrainedConfig, ranks: int, asked: StepConfig, tp: int = 1
) -> None:
    """Raise UnsupportedError for an unknown route or dtype, or one that does not fit the ring and the heads."""
    sent = asked.sent_as
    if asked.route == "auto":
        return
    way = Route.parse(asked.route, ranks)
    for heads, kv_heads in set(head_counts(config)):
        member_heads(heads // tp, kv_heads // tp, way.ulysses)
    way.check_sent_as(sent)


def refuse_kernel(
    decoder: PreTrainedModel,
    kernel: str,
    compute_dtype: torch.dtype | None,
    ring: DeviceMesh,
) -> None:
    """Raise if a kernel is unknown or cannot serve the model on the ring's devices."""
    kernels.check_name(kernel)
    config, dtype = decoder.config, compute_dtype or next(decoder.parameters()).dtype
    if not head_sizes(config):  # a model without attention
        return
    probe = torch.empty(
        1, 1, 1, max(head_sizes(config)), dtype=dtype, device=ring.device_type
    )
    scores = Scores(1.0, softcap=getattr(config, "attn_logit_softcapping", None) or 0.0)
    if refusal := kernels.why_not(kernel, probe, probe, scores):
        raise kernels.refused(kernel, refusal)


def say_shifted(model: PreTrainedModel) -> None:
    """Warn that a model's own loss takes labels differently from a ring."""
    _log.warning(
        "the loss of %s compares labels with the logits of the same token; on a ring labels are shifted, as those of "
        "other models are: give rs.shard_batch the tokens as labels, or what it compares as shift_labels",
        type(model).__name__,
    )


def _find_head(view: ModelView, plain: nn.Module) -> FoundHead:
    """Return how logits follow from the decoder's last hidden states, found by trying the model on made-up ones.

    First the output embedding is tried by itself, then with all modules that stand next to the decoder.
    UnsupportedError if neither gives the model's own logits. On the meta device nothing can be tried, and the config
    decides.
    """
    model, names = view.model, _behind_decoder(view, plain)
    wrong = ""
    for parts in ((), names) if names else ((),):
        head = joined([model.get_submodule(name) for name in parts]) if parts else plain
        refuse_mixing(head)
        embedding: Any = model.get_input_embeddings()
        with filled(head), filled(embedding, first_rows=True):
            if next(head.parameters()).is_meta:
                if names:
                    raise UnsupportedError(
                        f"{view.name} has layers between its decoder and its head, which cannot be tried "
                        "out without weights; use rs.from_pretrained, or make the model off the meta device"
                    )
                return FoundHead(
                    scale=logit_scale(model.config), softcap=logit_softcap(model.config)
                )
            found = _try_head(view, head)
            # NaN equals nothing, so weights that are not finite would be reported as an unknown head.
            if isinstance(found, str):
                refuse_not_finite(named_in(model, head), masks=False)
        if not isinstance(found, str):
            return found._replace(parts=parts)
        wrong = wrong or found
    raise UnsupportedError(wrong)


def _behind_decoder(view: ModelView, head: nn.Module) -> tuple[str, ...]:
    beside = [
        (name, part)
        for name, part in view.model.named_children()
        if view.decoder not in part.modules()
    ]
    if (
        not beside
        or head not in beside[-1][1].modules()
        or (beside[-1][1] is head and len(beside) == 1)
    ):
        return ()
    return tuple(name for name, _ in beside)


def _try_head(view: ModelView, head: nn.Module) -> FoundHead | str:
    """Return how logits follow from the head, or why they differ; raise if only the loss does."""
    like = next(current_copy(head).parameters())
    hidden = torch.randn(
        1, 3, input_size(head), generator=torch.Generator().manual_seed(0)
    ).to(like)
    kind, model = view.name, view.model
    try:
        with torch.no_grad(), giving(view.decoder, hidden):
            tokens = torch.tensor([[0, 1, 2]], device=like.device)
            # The made-up decoder outputs have no router scores for an auxiliary loss.
            takes_scores = (
                "output_router_logits" in inspect.signature(model.forward).parameters
            )
            made = model(
                input_ids=tokens,
                labels=tokens,
                **{"output_router_logits": False} if takes_scores else {},
            )
            ways = _ways(head, hidden, model.config)
    except Exception as error:
        return (
            f"{kind} makes its logits of more than its decoder's last hidden states ({_first_line(error)}), which a "
            "ring does not support yet; if the model raises this by itself too, use another release of transformers"
        )
    found = next(
        (found for found, expected in ways if is_same(made.logits, expected)), None
    )
    if found is None:
        return (
            f"{kind} has more between its decoder and its logits than its head, its scale and a soft cap, which a ring "
            "does not support yet"
        )
    loss, logits = made.loss.float(), made.logits[0].float()
    shifted, unshifted = (
        cross_entropy(logits[:-1], tokens[0, 1:]),
        cross_entropy(logits, tokens[0]),
    )
    if bool((loss - shifted).abs() <= 0.01 * shifted):
        return found
    if bool((loss - unshifted).abs() <= 1e-3 * unshifted):
        return found._replace(shifts=False)
    raise UnsupportedError(
        f"{kind} has a loss of its own, where a ring computes the cross-entropy of the next token; use the plain "
        "class of transformers, or compute the loss from the logits of model(**batch) without labels"
    )


def _ways(
    head: nn.Module, hidden: Tensor, config: PreTrainedConfig
) -> list[tuple[FoundHead, Tensor]]:
    """Return logits by the config, or only the head: Aya Vision and Granite Speech ignore their config."""
    said, plain = (
        FoundHead(scale=logit_scale(config), softcap=logit_softcap(config)),
        FoundHead(),
    )
    made = head(hidden)
    before = head(hidden * said.scale)  # the factor comes before the head (Inkling)
    return [
        (said, finished_logits(made, said.scale, said.softcap)),
        (said, before),
        (plain, made),
    ]


def is_same(logits: Tensor, expected: Tensor) -> bool:
    """Return True if logits are equal up to rounding, for example from a factor applied before the head."""
    rounding = 2 * torch.finfo(expected.dtype).eps * expected.abs().max()
    return logits.shape == expected.shape and bool(
        ((logits - expected).abs() <= rounding).all()
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def giving(decoder: nn.Module, hidden: Tensor) -> AbstractContextManager[None]:
    """Make a decoder return these hidden states, whatever its arguments."""
    return instead(decoder, lambda *_, **__: _Outputs(last_hidden_state=hidden))


class _Outputs(MoeModelOutputWithPast):
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
