"""TRL's fused head on a ring: per-token log-probabilities and entropies, by its own code.

``add_fused_lm_head`` sets a ``forward``: decoder, then TRL's kernels on hidden states. The ring's pass runs the
decoder; TRL's forward gets local hidden states in place of a model. B batch, S global tokens, T local tokens.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.layers.modules import class_name
from ringspan.torch.layers.view import RingModel
from ringspan.torch.model.tasks.causal_lm import PerToken

FIELDS: Final = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def take_fused_forward(model: nn.Module) -> Callable[..., Any] | None:
    """Remove and return the forward set by ``add_fused_lm_head``, or None; on a ring it would call the old forward."""
    forward: Any = vars(model).get("forward")
    if "fused_lm_head" not in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
        return None
    del model.forward
    return forward.__func__


def fused_output(
    model: RingModel, call: Callable[..., Any], gathered: Callable[[Tensor], Tensor], count: int | None
) -> object:
    """Return TRL's ``FusedCausalLMOutput``, (B, S) in the whole batch's order on every rank.

    ``call``: the ring's pass of the local batch; ``count``: targets to divide the loss by, None for the batch's.
    """
    forward: Any = getattr(vars(model).get("forward"), "__func__", None) or vars(model).get("ring_fused_forward")
    if forward is None:
        raise UnsupportedError("fused_lm_head=True: this model has no fused head; call trl's add_fused_lm_head first")
    if model.ring_head_parts:
        raise UnsupportedError(
            f"fused_lm_head=True: {class_name(model)} has layers between its decoder and its head, which TRL's "
            "fused head leaves out; use fused_lm_head=False"
        )
    found: list[Any] = []
    asked = PerToken("a forward pass", partial(_per_token, forward, found))
    output = call(ring_asked=asked)
    kind, names = found
    numbers = gathered(output.logits).unbind(-1)
    values: dict[str, Any] = dict(zip(names, numbers, strict=True))
    values |= {name: values[name].detach() > 0.5 for name in ("is_top1", "label_mask") if name in values}
    values |= {name: values[name].detach() for name in ("log_sum_sq_probs", "mean_logits") if name in values}
    total = values["label_mask"].sum().clamp(min=1) if count is None else count
    return kind(loss=-values["log_probs"].sum() / total, aux_loss=getattr(output, "aux_loss", None), **values)


def _per_token(
    forward: Callable[..., Any], found: list[Any], model: PreTrainedModel, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Run TRL's forward on local hidden states; concatenate its results as (B, T, fields)."""
    in_place = SimpleNamespace(
        base_model=lambda **_: SimpleNamespace(last_hidden_state=hidden),
        get_output_embeddings=model.get_output_embeddings,
    )
    # The load-balancing loss is the ring's, over the tokens of all ranks.
    output = forward(in_place, fused_lm_head=True, shift_labels=targets.long(), output_router_logits=False)
    names = [name for name in FIELDS if getattr(output, name) is not None]
    found[:] = type(output), names
    return torch.stack([getattr(output, name).float() for name in names], -1)
