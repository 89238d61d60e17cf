"""Causal language models on a ring: the loss of the whole batch from local tokens."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
)

from ringspan.core.errors import UnsupportedError
from ringspan.core.names import ReductionName
from ringspan.torch.data.batch import SHARDED
from ringspan.torch.data.batch_layout import BatchLayout, Unsharded
from ringspan.torch.data.cross_entropy import blockwise_cross_entropy
from ringspan.torch.data.loss_blocks import LossOptions
from ringspan.torch.data.targets import Targets, whole_results
from ringspan.torch.engine.attention.traced import ends_of
from ringspan.torch.engine.transport.collectives import Sum, SumOfGradients
from ringspan.torch.model.config_changes import check_configs
from ringspan.torch.model.consistency.fixed import Fixed, Weights
from ringspan.torch.model.consistency.forward import (
    agreeing,
    check_forward,
    in_pass,
    recovering,
)
from ringspan.torch.model.consistency.loop_watch import watch_backward
from ringspan.torch.model.forward_arguments import check_arguments
from ringspan.torch.model.layers.blockwise.head import (
    called_cross_entropy,
    current_copy,
    head_of,
    in_dtype_for,
    is_its_weight,
    kind_of_head,
    logits_of,
    refuse_mixing,
)
from ringspan.torch.model.layers.decoder import finished_logits
from ringspan.torch.model.layers.modules import class_name, local_part
from ringspan.torch.model.layers.router_loss import wanted_router
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.local_pass import LocalPass, local_hidden_states
from ringspan.torch.model.memory.sharding import renew_types, settle, with_shards
from ringspan.torch.model.saving import Saved
from ringspan.torch.model.tensor_parallel.split import splits_vocabulary
from ringspan.torch.runtime.mesh import loss_groups, tensor_axis


class Asked(Enum):
    LOSS = "a forward pass"
    LOGPROBS = "token_logprobs"
    ENDS = "the logits of rows"


@dataclass
class LearningOutput(MoeCausalLMOutputWithPast):
    """Output of a pass to which mechanisms add; ``loss`` includes their gradient but not their value."""

    index_loss: Tensor | None = None


@dataclass(frozen=True)
class PerToken:
    """Request for per-token numbers, returned as ``logits``; ``value`` is the call's name in errors.

    ``compute``: (model, hidden (B, T, C), targets (B, T)) -> (B, T, ...), run while the head's weights are whole.
    """

    value: str
    compute: Callable[[Any, Tensor, Tensor], Tensor]

    def __str__(self) -> str:
        # Ranks compare requests as text.
        return self.value


class RingCausalLM(Saved, Fixed, RingModel):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """Mixin that ``parallelize`` adds to a model's class: one loss for the whole batch, without whole logits."""

    @torch.compiler.disable(recursive=False)
    def __call__(self: Any, *args: object, **kwargs: object) -> object:
        """Run a pass after all ranks agree on it; mechanisms such as folds may run it in their own way."""
        call: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        asked = asked_in(kwargs)
        with in_pass(self, asked.value):
            bind = partial(self.ring_bind, args, kwargs)
            kwargs = check_forward(self, bind, partial(_check_asked, self), asked.value)
            weights = Weights(self)
            with recovering(self), agreeing(self, kwargs):
                runs = (each.runs(self) for each in self.ring_mechanisms)
                run = next((each for each in runs if each is not None), None)
                if run is not None:
                    return weights.until_backward(run(self, call, kwargs))
                return weights.until_backward(with_shards(self, call(**kwargs)))

    def ring_bind(
        self: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        return _bind(self, args, kwargs)

    def named_parameters(
        self: Any, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if not self.ring_is_generating and isinstance(self, FSDPModule):
            settle(self)
        return super().named_parameters(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # Collectives are not compiled; the layers called from here are.
    @torch.compiler.disable(recursive=False)
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        document_lengths: Tensor | None = None,
        sequence_length: int | Tensor | None = None,
        batch_digest: Tensor | None = None,
        layout_digest: Tensor | None = None,
        real_tokens: Tensor | None = None,
        media: object = None,
        tree_targets: Tensor | None = None,
        routes: Tensor | None = None,
        output_router_logits: bool | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast | Tensor:
        """Map local tokens (B, T) and positions to the global loss, or to local logits without labels.

        ``document_lengths`` (B, documents), padded with 0: tokens see only their own document, positions count within
        it. ``sequence_length``: of the longest document. ``output_router_logits``, from the config when None, adds the
        auxiliary loss over all ranks' ``real_tokens`` (B, T), all but the layout's padding when None. ``media`` are the
        whole batch's, ``tree_targets`` (R, 2 or 3) a tree's. ``routes`` (B, T, layers, K): experts that tokens go to.
        ``ring_asked`` in ``kwargs``: log-probabilities for ``token_logprobs``, or a ``PerToken``.
        ``index_loss`` of the result is what indexes learn from (``ringspan.torch.mechanisms.chosen_keys.index_loss``).
        ``labels`` and ``attention_mask`` raise in ``__call__``; Trainer keeps the data columns named here, and
        ``shard_batch`` takes both. ``ring_fold`` is the fold of these tokens.

        Raises:
            UnsupportedError: an argument that a ring does not honour or no model has, or a config changed since
                ``parallelize``.
        """
        if (
            input_ids is None
            or position_ids is None
            or num_items_in_batch is None
            or sequence_length is None
        ):
            raise UnsupportedError(
                "forward was called by itself: call model(**batch), which gathers the weights first"
            )
        renew_types(self)
        asked = asked_in(kwargs)
        is_scored = asked is Asked.LOGPROBS
        router = None if is_scored else wanted_router(self, output_router_logits)
        recording = nullcontext() if router is None else router.recorder.recording()
        targets = None
        if shift_labels is not None:
            targets = Targets(shift_labels, tree_targets)
        now = LocalPass(
            model=self,
            input_ids=input_ids,
            position_ids=position_ids,
            longest=int(sequence_length),
            document_lengths=document_lengths,
            given={
                "media": media,
                "fold": kwargs.get("ring_fold"),
                "routes": routes,
            },
            real_tokens=real_tokens,
            wants_loss=asked is Asked.LOSS and targets is not None,
            targets=targets,
            count=int(num_items_in_batch),
        )
        with recording as scores:
            hidden = local_hidden_states(now)
        auxiliary = None
        if router is not None:
            groups = loss_groups(self.ring_mesh)
            auxiliary = router(scores or [], now.real.flatten(), groups)
        if targets is None:
            logits = finished_logits(
                logits_of(head_of(self), hidden),
                self.ring_loss.logit_scale,
                self.ring_loss.softcap,
            )
            return output_of(auxiliary, logits=logits)
        hidden = targets.predicted_by(hidden)
        if is_scored:
            return watch_backward(_logprobs(now, hidden, targets))
        if isinstance(asked, PerToken):
            found = asked.compute(self, hidden, targets.labels)
            return output_of(auxiliary, logits=watch_backward(found))
        loss = _loss(self, hidden, targets, now.count)
        if router is not None and auxiliary is not None:
            loss = loss + getattr(self, router.coefficient) * auxiliary
        for each in self.ring_mechanisms:
            loss = each.finish(now, loss)
        return output_of(auxiliary, loss=watch_backward(loss), **now.outputs)


_PLAIN_OUTPUT: Final = frozenset({"loss", "logits"})
_SIGNATURE: Final = inspect.signature(RingCausalLM.forward)


@torch.compiler.disable()
def _loss(model: RingModel, hidden: Tensor, targets: Targets, count: int) -> Tensor:
    # Evaluation is plain cross-entropy, without z_loss and label smoothing.
    options = model.ring_loss if model.training else _plain(model)
    if targets.weights is None:
        total = _cross_entropy(model, hidden, targets.labels, options, "sum")
    else:
        each = _cross_entropy(model, hidden, targets.labels, options, "none")
        total = (each * targets.weights).sum()
    return Sum.apply(total / max(count, 1), loss_groups(model.ring_mesh))


@torch.compiler.disable()
def _logprobs(now: LocalPass, hidden: Tensor, targets: Targets) -> Tensor:
    """Compute the log-probability of each target (B, S) on every rank of the ring; 0 without a target."""
    model, lengths = now.model, now.document_lengths
    local = local_logprobs(model, hidden, targets.labels)
    length = whole_length(now.longest, lengths)
    if targets.places is None:
        return gathered_tokens(model, local, length, lengths)
    group = model.ring_axis.get_group()
    return whole_results(local, targets.places, length, group)


def whole_length(longest: int, document_lengths: Tensor | None) -> int:
    """Return the tokens of a batch's rows, unpadded."""
    return longest if document_lengths is None else int(ends_of(document_lengths).max())


def local_logprobs(model: RingModel, hidden: Tensor, targets: Tensor) -> Tensor:
    return 0.0 - _cross_entropy(model, hidden, targets, _plain(model), "none").view(
        targets.shape
    )


def gathered_tokens(
    model: RingModel, local: Tensor, length: int, document_lengths: Tensor | None
) -> Tensor:
    """Gather local results (B, T, ...) of tokens into all tokens' (B, ``length``, ...), on every rank of the ring."""
    ring = model.ring_axis
    split = BatchLayout.of(
        model.ring_layout, length, ring.size(), document_lengths, model.ring_folds
    )
    return Unsharded.apply(local, split, ring.get_group())


def _plain(model: RingModel) -> LossOptions:
    return replace(model.ring_loss, z_loss=0.0, label_smoothing=0.0)


def _cross_entropy(
    model: RingModel,
    hidden: Tensor,
    targets: Tensor,
    options: LossOptions,
    reduction: ReductionName,
) -> Tensor:
    """Return the cross-entropy of targets (B, T) given hidden states (B, T, C), in blocks: no whole logits exist.

    A head that is only a matrix, with a bias or without, is multiplied here, split over tensor-parallel ranks if they
    share the vocabulary. Any other head is called on blocks of tokens.
    """
    tp = tensor_axis(model.ring_mesh)
    head: Any = head_of(model)
    share = tp.get_group() if tp is not None and splits_vocabulary(head) else None
    plain: Any = head if tp is not None else current_copy(head)
    if is_its_weight(plain):
        hidden = in_dtype_for(plain, hidden)
        return blockwise_cross_entropy(
            (hidden if share is None else SumOfGradients.apply(hidden, share)).flatten(
                0, 1
            ),
            local_part(plain.weight),
            targets.flatten(),
            bias=None if plain.bias is None else local_part(plain.bias),
            group=share,
            reduction=reduction,
            **asdict(options),
        )
    _refuse_head(model, head, is_split=share is not None)
    return called_cross_entropy(
        hidden.flatten(0, 1), head, targets.flatten(), options, reduction
    )


def _refuse_head(model: RingModel, head: nn.Module, *, is_split: bool) -> None:
    """Raise UnsupportedError if hooks or adapters were added to the head and it cannot be called on blocks."""
    if is_split:
        raise UnsupportedError(
            f"the head ({type(head).__name__}) has hooks or adapters, and tp splits its vocabulary; use tp=1"
        )
    kind = kind_of_head(head)
    if kind != model.ring_head:
        refuse_mixing(head)
        vars(model)["ring_head"] = kind


def output_of(
    auxiliary: Tensor | None, **values: Any
) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
    """Return a model's output, with the routers' auxiliary loss or what a mechanism adds if there is any."""
    if not values.keys() <= _PLAIN_OUTPUT:
        return LearningOutput(aux_loss=auxiliary, **values)
    if auxiliary is None:
        return CausalLMOutputWithPast(**values)
    return MoeCausalLMOutputWithPast(aux_loss=auxiliary, **values)


def asked_in(arguments: dict[str, Any]) -> Asked | PerToken:
    asked = arguments.get("ring_asked")
    return asked if isinstance(asked, Asked | PerToken) else Asked.LOSS


def _bind(
    model: RingModel, args: Sequence[Any], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Bind a call's arguments to the names of ``forward``.

    UnsupportedError if a request for per-token numbers lacks targets, or ``token_logprobs`` gets unknown keys.
    """
    bound = _SIGNATURE.bind(model, *args, **kwargs)
    asked = asked_in(kwargs)
    if asked is not Asked.LOSS:
        given = {name for name, value in kwargs.items() if value is not None} - {
            "ring_asked"
        }
        if asked is Asked.LOGPROBS and (unknown := sorted(given - SHARDED)):
            raise UnsupportedError(
                f"token_logprobs takes what rs.shard_batch returned, and no {', '.join(unknown)}"
            )
        if "input_ids" in given and "shift_labels" not in given:
            raise UnsupportedError(
                f"{asked.value} needs targets; give rs.shard_batch labels or shift_labels"
            )
    return bound


def _check_asked(model: RingModel, arguments: dict[str, Any]) -> None:
    others = {
        name: value
        for name, value in arguments.items()
        if not isinstance(value, Asked | PerToken)
    }
    check_arguments(class_name(model), others)
    check_configs(model.ring_configs)


def token_logprobs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the log-probability of each target of a batch, on every rank of its ring, in the whole batch's order.

    Equals, for the whole batch on one process but without whole logits,

        logits = model(input_ids, attention_mask, position_ids).logits.float()
        targets = shift_labels or labels, shifted                       # (B, S), -100 for none
        where(targets == -100, 0, log_softmax(logits, -1).gather(-1, targets))

    Entry i belongs to the target of token i, which is token i + 1; a row's sum is the log-probability of its unmasked
    tokens. All ranks of a ring compute the same value from the result, and its gradients count once. Replicas have
    different rows, and gradients are summed over them: a mean divides by the examples of all replicas. ``z_loss``,
    ``label_smoothing`` and the auxiliary router loss are left out. For a tree of segments, entry i belongs to token i
    itself, so that segment ``s`` has ``logprobs[0].split(segment_lengths)[s]``.

    Args:
        model: from ``parallelize``.
        batch: from ``shard_batch`` with ``labels`` or ``shift_labels``.

    Returns:
        (B, S) in float32 (float64 for a float64 model), S the tokens of each sequence before ``shard_batch``.

    Raises:
        UnsupportedError: a model that is not from ``parallelize``; on every rank, a batch without targets, or not from
            ``shard_batch``.
        PeerMismatch: ranks were given different batches, or make different calls.
    """
    if not isinstance(model, nn.Module) or not any(
        isinstance(part, RingCausalLM) for part in model.modules()
    ):
        raise UnsupportedError(
            f"token_logprobs needs what rs.parallelize returned, got a {type(model).__name__}"
        )
    # Anything but a batch raises in the model's call, so that it raises on the other ranks too.
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    return model(**given, ring_asked=Asked.LOGPROBS)
