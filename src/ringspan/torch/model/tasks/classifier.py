"""Classifiers on a ring: L logits of each sequence's last token, which any rank may hold, or of each token."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)

from ringspan.core.errors import UnsupportedError
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.data.targets import Targets
from ringspan.torch.engine.transport.collectives import Sum
from ringspan.torch.model.consistency.loop_watch import watch_backward
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.router_loss import refuse_router_loss
from ringspan.torch.model.layers.view import ModelView, RingModel
from ringspan.torch.model.local_pass import LocalPass, local_hidden_states
from ringspan.torch.model.memory.sharding import renew_types
from ringspan.torch.model.support import giving, is_same, refuse_unsupported_decoder
from ringspan.torch.model.tasks.causal_lm import Asked, RingCausalLM
from ringspan.torch.model.view import LABELS, SEQUENCES
from ringspan.torch.model.weights.loading import named_in, refuse_not_finite


def pools(model: nn.Module) -> bool:
    return class_name(model).endswith(SEQUENCES)


def refuse_classifier(view: ModelView) -> None:
    name, model, decoder = view.name, view.model, view.decoder
    if decoder not in model.children():
        raise UnsupportedError(
            f"{name} has more than a decoder and its {LABELS}, which a ring does not support yet"
        )
    refuse_unsupported_decoder(view)
    refuse_router_loss(view)
    for path, module in model.named_children():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedError(
                f"{name}: {path} drops {module.p} of what its head is given, by each rank's own numbers; set "
                "classifier_dropout=0.0 in its config"
            )
    if not next(model.parameters()).is_meta:
        _try_head(model, decoder)


@torch.no_grad()
def _try_head(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise UnsupportedError for a classifier that does more than head and pooling, tried on made-up hidden states."""
    name, head = type(model).__name__, getattr(model, LABELS)
    like = next(head.parameters())
    padding = model.config.get_text_config().pad_token_id
    words = [word for word in range(4) if word != padding][:3]
    rows = (
        [words]
        if padding is None
        else [words, [words[0], words[1], padding], [padding, *words[:2]]]
    )
    ids = torch.tensor(rows, device=like.device)
    size = model.config.get_text_config().hidden_size
    hidden = torch.randn(
        len(rows), 3, size, generator=torch.Generator().manual_seed(0)
    ).to(like)
    try:
        with giving(decoder, hidden):
            logits, expected = model(input_ids=ids).logits, head(hidden)
    except Exception as error:
        raise UnsupportedError(
            f"{name} makes its logits of more than its decoder's last hidden states; use transformers' own class"
        ) from error
    if pools(model):
        expected = expected[range(len(rows)), [2, 1, 2][: len(rows)]]
    if not is_same(logits, expected):
        # NaN equals nothing, so weights that are not finite are reported first.
        refuse_not_finite(named_in(model, head), masks=False)
        raise UnsupportedError(
            f"{name} has more between its decoder and its logits than its {LABELS} and the last token, which a ring "
            "does not support yet"
        )


class RingClassifier(RingCausalLM):
    def ring_bind(
        self: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        """Bind a call's arguments to names; raise for labels, log-probabilities, or rows with an unknown last token."""
        name = class_name(self)
        if kwargs.get("ring_asked") not in (None, Asked.ENDS):
            raise UnsupportedError(
                f"{name} predicts no tokens; give token_logprobs a causal language model"
            )
        bound = super().ring_bind(args, kwargs)
        # The ends of rows stand in for labels.
        if "ring_asked" in kwargs:
            return bound
        if bound.arguments.get("shift_labels") is not None:
            raise UnsupportedError(
                f"{name} takes no labels on a ring; compute the loss of its logits, which every rank has"
            )
        if (
            lengths := bound.arguments.get("document_lengths")
        ) is not None and lengths.ndim == 3:
            raise UnsupportedError(
                f"{name} predicts no tokens; give it separate rows, and no tree of segments"
            )
        if pools(self) and isinstance(ids := bound.arguments.get("input_ids"), Tensor):
            _padding_of(self, len(ids))
        return bound

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self: Any,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_lengths: Tensor | None = None,
        sequence_length: int | Tensor | None = None,
        batch_digest: Tensor | None = None,
        layout_digest: Tensor | None = None,
        real_tokens: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        tree_targets: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> SequenceClassifierOutputWithPast | TokenClassifierOutput:
        """Map local tokens (B, T) to sequence logits (B, L) on every rank, or local token logits (B, T, L).

        A sequence's logits come from its last token other than ``pad_token_id``, as in transformers. All ranks of a
        ring compute the same loss from them; its gradients count once and are summed over replicas. ``attention_mask``
        and ``labels`` raise in ``__call__``; they are named for callers that inspect the signature.
        """
        assert (
            input_ids is not None
            and position_ids is not None
            and sequence_length is not None
        ), "by __call__"
        renew_types(self)
        longest = int(sequence_length)
        now = LocalPass(self, input_ids, position_ids, longest, document_lengths)
        hidden = local_hidden_states(now)
        head: Any = getattr(self, LABELS)
        # A tree of rows: local logits (1, R, L) of the rows' last tokens (``ends_of``).
        if shift_labels is not None and tree_targets is not None:
            last = Targets(shift_labels, tree_targets).predicted_by(hidden)
            pooled = head(last) * (shift_labels != IGNORED)[..., None]
            return SequenceClassifierOutputWithPast(logits=watch_backward(pooled))
        if not pools(self):
            return TokenClassifierOutput(logits=watch_backward(head(hidden)))
        ring = self.ring_axis
        whole = (
            longest if document_lengths is None else int(document_lengths.sum(1).max())
        )
        split = BatchLayout.of(self.ring_layout, whole, ring.size(), document_lengths)
        places = (
            split.positions(ring.get_local_rank())
            .to(input_ids.device)
            .expand(input_ids.shape)
        )
        last = _last_places(self, input_ids, places, whole)
        is_here = places == last[:, None]
        _refuse_padding(self, is_here, real_tokens)
        rows = torch.arange(len(hidden), device=hidden.device)
        pooled = head(hidden[rows, is_here.int().argmax(1)])
        # One rank has each row's last token and adds its logits; the others add zeros.
        own = torch.where(is_here.any(1, keepdim=True), pooled, 0.0)
        precise = own.to(torch.promote_types(own.dtype, torch.float32))
        logits = Sum.apply(precise, [ring.get_group()]).to(pooled.dtype)
        return SequenceClassifierOutputWithPast(logits=watch_backward(logits))


def _refuse_padding(model: RingModel, is_here: Tensor, real: Tensor | None) -> None:
    of_padding = torch.zeros_like(is_here) if real is None else is_here & ~real
    found = torch.where(
        of_padding.any(1), torch.arange(1, len(is_here) + 1, device=is_here.device), 0
    ).amax()
    for axis in ("ring", "replicate"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=model.ring_mesh.get_group(axis))
    if row := int(found):
        raise _ends_in_padding(model, row - 1)


def _ends_in_padding(model: RingModel, row: int) -> UnsupportedError:
    return UnsupportedError(
        f"row {row}: its last token that is no pad_token_id ({model.config.get_text_config().pad_token_id}) is "
        "padding by attention_mask; leave rows of padding alone out, and pad with that token"
    )


def _padding_of(model: RingModel, rows: int) -> int | None:
    padding = model.config.get_text_config().pad_token_id
    if padding is None and rows > 1:
        raise UnsupportedError(
            f"{class_name(model)} has no pad_token_id, which tells where each of {rows} sequences ends; set it"
        )
    return padding


def ends_of(model: RingModel, ids: Tensor, real: Tensor | None) -> Tensor:
    """Return 0 at each row's last token other than ``pad_token_id``, -100 elsewhere, (B, S)."""
    padding, places = (
        _padding_of(model, len(ids)),
        torch.arange(ids.shape[1], device=ids.device),
    )
    last = torch.where(ids != (-1 if padding is None else padding), places, 0).amax(
        1, keepdim=True
    )
    for row in [] if real is None else (~real.gather(1, last))[:, 0].nonzero().tolist():
        raise _ends_in_padding(model, row[0])
    return torch.full_like(ids, IGNORED).scatter_(1, last, 0)


def _last_places(model: RingModel, ids: Tensor, places: Tensor, length: int) -> Tensor:
    padding = model.config.get_text_config().pad_token_id
    if padding is None:
        return torch.full((len(ids),), length - 1, device=ids.device)
    last = torch.where((ids != padding) & (places < length), places, 0).amax(1)
    dist.all_reduce(last, dist.ReduceOp.MAX, group=model.ring_axis.get_group())
    return last
