"""A classifier on a ring, called with whole batches and labels. B batch, S global tokens, L labels, R replicas."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ringspan.torch.consistency.calls import preparing
from ringspan.torch.data.batch import IGNORED, TAKEN, shard_batch
from ringspan.torch.data.padding import real_tokens, refuse_targets_of_padding
from ringspan.torch.layers.view import RingModel
from ringspan.torch.model.adapters import base_of
from ringspan.torch.model.tasks.causal_lm import Asked, gathered_tokens
from ringspan.torch.model.tasks.classifier import RingClassifier, ends_of, pools
from ringspan.torch.model.tasks.shared_rows import SharedRows


def classifies(model: nn.Module) -> bool:
    """Return True for a classifier on a ring, also inside adapters."""
    return isinstance(base_of(model), RingClassifier)


def classified(model: RingModel, call: Callable[..., Any], kwargs: dict[str, Any]) -> object:
    """Run the whole batch in ``kwargs``: logits (B, L), or (B, S, L) for tokens, on all ranks; with labels also a loss.

    Classifiers take a mean; if Trainer has counted targets, it multiplies by the count, so the loss is 1/R of the mean.
    """
    whole = {name: kwargs.pop(name) for name in TAKEN if name in kwargs}
    labels, count = whole.pop("labels", None), kwargs.pop("num_items_in_batch", None)
    kwargs.pop("margin", None)  # TRL's reward trainer gives models its whole batch
    with preparing(model.ring_mesh, "a forward pass"):
        if labels is not None and not pools(model):
            refuse_targets_of_padding(labels != IGNORED, real_tokens(whole), "labels", 0)
        least, shared = model.ring_min_shared, None
        if least is None:
            local = shard_batch(whole, model.ring_mesh, layout=model.ring_layout)
        else:
            ends = ends_of(model, whole["input_ids"], real_tokens(whole))
            shared = SharedRows(model, whole | {"shift_labels": ends}, least)
            local, kwargs["ring_asked"] = shared.local, Asked.ENDS
    output = call(**local, **kwargs)
    logits: Tensor = output.logits.float() if model.ring_autocast is not None else output.logits
    if shared is not None:
        logits = shared.of_targets(logits).sum(1)
    if not pools(model):
        length, lengths = whole["input_ids"].shape[1], local.get("document_lengths")
        logits = gathered_tokens(model, logits, length, lengths).contiguous()  # losses look at it flat
    output.logits = logits
    if labels is None:
        return output
    if pools(model):
        loss = model.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=model.config)
    else:
        loss = model.loss_function(logits, labels, model.config)
    if count is not None:
        loss = loss / model.ring_mesh["replicate"].size()
    return type(output)(loss=loss, logits=logits)
