"""A model on a ring that is called like any model: with whole batches, for whole results.

Trainers call ``model(input_ids=..., labels=...)`` in many places, so batches are split in the model's call. Gradients
are averaged over replicas, because a trainer counts a ring as one process. TRL's fused head (``add_fused_lm_head``) is
a ``forward`` that runs the decoder, then TRL's kernels. Here the ring's pass runs the decoder, and TRL's forward gets a
stand-in for the model that returns local hidden states. B batch, S global tokens, T local tokens, V vocabulary, L
labels, R replicas.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
)

from ringspan.core.errors import UnsupportedError
from ringspan.hf.config import RingConfig
from ringspan.hf.refusals import refuse_loss_options
from ringspan.hf.routes import routed
from ringspan.proof.before import prove_before
from ringspan.torch.data.padding import IGNORED, real_tokens, refuse_targets_of_padding
from ringspan.torch.data.targets import Targets
from ringspan.torch.generate.cache.cache import RingCache
from ringspan.torch.mechanisms.trees.shared_rows import SharedRows
from ringspan.torch.model.adapters import base_of
from ringspan.torch.model.consistency.calls import exchanging, preparing
from ringspan.torch.model.layers.cache_names import given_cache
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.modules import class_name, mix_in, seen_as
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.tasks.causal_lm import (
    Asked,
    PerToken,
    RingCausalLM,
    gathered_tokens,
)
from ringspan.torch.model.tasks.classifier import RingClassifier, ends_of, pools
from ringspan.torch.parallelize import put_on_mesh
from ringspan.torch.shard_batch import TAKEN, shard_batch

_log: Final = logging.getLogger(__name__)
# Fields of TRL's fused output.
FIELDS: Final = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
    "label_mask",
)


class WholeBatches:
    """Mix-in of ``takes_whole_batches`` for a model's class."""

    ring_autocast: Callable[..., AbstractContextManager[Any]] | None = None
    ring_wants_logits = False  # True if a pass with labels returns logits too
    ring_checkpoint: str
    # Routes of the rows that a trainer has generated (``KeptRoutes``); None if it replays none.
    ring_kept_routes: Any = None

    @torch.compiler.disable(recursive=False)
    def __call__(self: Any, *args: Any, **kwargs: object) -> Any:
        """Run a whole batch; return what transformers' model gives for it, on every rank of the ring.

        With labels: the loss, and logits (B, S, V) if ``whole_logits`` asks; else differentiable logits; a classifier's
        logits always. ``fused_lm_head=True``: TRL's fused output. ``num_items_in_batch`` counts all replicas' targets;
        the loss is then 1/R, since callers multiply by the number of processes, as Trainer does. A batch from
        ``shard_batch`` has its loss and gradients without a trainer.
        """
        call: Any = super().__call__  # pyright: ignore[reportAttributeAccessIssue]
        if args:
            bound = (
                inspect.signature(type(self).forward)
                .bind(self, *args, **kwargs)
                .arguments
            )
            kwargs = {
                name: value
                for name, value in bound.items()
                if name not in ("self", "kwargs")
            }
            kwargs |= bound.get("kwargs", {})
        if self.ring_is_generating or isinstance(given_cache(kwargs), RingCache):
            return call(**kwargs)
        called = classified if _is(self, RingClassifier) else _called
        with (
            exchanging(),
            nullcontext() if self.ring_autocast is None else self.ring_autocast(),
        ):
            if "batch_digest" in kwargs or "ring_asked" in kwargs:  # from shard_batch
                output = call(**kwargs)
                if getattr(output, "loss", None) is not None:
                    output.loss = _of_replica(self, output.loss, is_counted=False)
                return output
            return called(
                self,
                call,
                {name: value for name, value in kwargs.items() if value is not None},
            )

    is_gradient_checkpointing = is_activation_checkpointing = False
    """Flags of transformers, which TRL turns off in passes without gradients.

    A ring's checkpoints keep nothing then.
    """

    def gradient_checkpointing_enable(self: Any, *args: Any, **kwargs: Any) -> None:
        """Note once that ``RingConfig(checkpoint=...)`` decides."""
        if self.ring_checkpoint == "none":
            raise UnsupportedError(
                "gradient_checkpointing=True contradicts RingConfig(checkpoint='none'); drop one of the two"
            )
        options = (
            dict(
                zip(
                    ("gradient_checkpointing_kwargs", "every_n_layers", "offload"),
                    args,
                    strict=False,
                )
            )
            | kwargs
        )
        if options.get("every_n_layers", 1) != 1:
            raise UnsupportedError(
                "on a ring, use RingConfig(layers_per_checkpoint=...) instead of every_n_layers"
            )
        if options.get("offload"):
            raise UnsupportedError(
                "offload of activations is not supported on a ring; use RingConfig(offload=...)"
            )
        for name in (
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
        ):
            others = set(options.get(name) or {}) - {"use_reentrant"}
            if others:
                raise UnsupportedError(
                    f"{name} has {min(others)}, which layers on a ring do not take; leave it out"
                )
        if dist.get_rank() == 0:
            _log.warning(
                "layers are checkpointed by RingConfig(checkpoint=%r)",
                self.ring_checkpoint,
            )

    activation_checkpointing_enable = gradient_checkpointing_enable


def takes_whole_batches(
    model: nn.Module,
    mesh: DeviceMesh,
    config: RingConfig,
    autocast: Callable[..., AbstractContextManager[Any]] | None = None,
) -> None:
    """Put a model on a ring if it is not yet, and let it take whole batches, in place.

    ``autocast`` makes its contexts.
    """
    base: Any = base_of(model)
    fused, plain = take_fused_forward(base), type(base).forward
    is_on_ring = _is(base, RingCausalLM)
    if config.prove:
        step = base.ring_step if is_on_ring else config.step
        prove_before(model, mesh, step, tree=config.shared_prefix)
    if not is_on_ring:
        devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
        # The random state is kept, so that later draws equal one process's.
        with torch.random.fork_rng(devices):
            put_on_mesh(model, mesh, config.step)  # pyright: ignore[reportArgumentType]
    if config.shared_prefix and _is(base, RingClassifier) and not pools(base):
        raise UnsupportedError(
            "shared_prefix=True: this model labels each token, and shared ones once; leave it out"
        )
    if not _is(base, WholeBatches):
        about = {
            "ring_checkpoint": config.checkpoint,
            "ring_min_shared": config.min_shared,
        }
        mix_in(base, WholeBatches, **about, forward=seen_as(plain, type(base).forward))
        # Gradients are means over replicas, as in data parallelism.
        for module in base.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(
                    float(base.ring_mesh.get_group("replicate").size())
                )
    if fused is not None:
        base.ring_fused_forward = fused
    if autocast is not None:
        type(base).ring_autocast = staticmethod(autocast)


def _is(model: object, kind: type) -> bool:
    return isinstance(model, kind)


@contextmanager
def whole_logits(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    kind: Any = type(base_of(model))
    before, kind.ring_wants_logits = kind.ring_wants_logits, wanted
    try:
        yield
    finally:
        kind.ring_wants_logits = before


def _called(model: Any, call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Run a whole batch of a causal LM and return its output, in one of three forms.

    Fused: TRL's per-token fields, gathered. With labels: the loss, scaled for replicas. Otherwise, or if
    ``whole_logits`` asks: logits (B, S, V) gathered from local ones, and with labels the evaluation loss from them.
    """
    whole = {name: kwargs.pop(name) for name in TAKEN if name in kwargs}
    with routed(model, whole) as keep:
        local, output = _passed(model, call, whole, kwargs)
        keep(local)
    return output


def _passed(
    model: Any, call: Callable[..., Any], whole: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Split a whole batch and run it; return this rank's part of the batch, and the output."""
    is_fused, count = kwargs.pop("fused_lm_head", False), None
    least, shared = model.ring_min_shared, None
    with preparing(model.ring_mesh, "a forward pass"):
        count = _counted(kwargs.pop("num_items_in_batch", None))
        if least is not None:
            shared = SharedRows(model, whole, least)
        split: Any = {"layout": model.ring_layout, "folds": model.ring_folds}
        local = (
            shard_batch(whole, model.ring_mesh, **split)
            if shared is None
            else shared.local
        )
        if is_fused and "shift_labels" not in local:
            raise UnsupportedError("fused_lm_head=True needs labels")
        if is_fused or "shift_labels" not in local:
            refuse_loss_options(model)

    taken = _Pass(model, call, whole, local, shared, count, kwargs)
    if is_fused:
        return local, taken.fused()
    if local.get("shift_labels") is not None and not model.ring_wants_logits:
        return local, taken.loss()
    return local, taken.logits()


@dataclass(frozen=True)
class _Pass:
    """A model's own call on this rank's part of a whole batch, in one of three forms."""

    model: Any
    call: Callable[..., Any]
    whole: dict[str, Any]
    local: dict[str, Any]
    shared: SharedRows | None
    count: int | None
    others: dict[str, Any]

    def fused(self) -> Any:
        """Return TRL's per-token fields of the whole batch."""
        model, shared = self.model, self.shared
        output: Any = fused_output(
            model,
            lambda **asked: self.call(**self.local, **asked, **self.others),
            self._gathered if shared is None else shared.of_targets,
            self.count,
        )
        if output.aux_loss is not None:
            output.aux_loss = _of_replica(model, output.aux_loss, is_counted=False)
            # TRL's fused head adds it with this coefficient.
            coefficient = getattr(
                text_config(model.config), "router_aux_loss_coef", 0.0
            )
            output.loss = output.loss + coefficient * output.aux_loss
        return output if "shift_labels" in self.whole else _without_last(output)

    def loss(self) -> Any:
        """Return the ring's loss, scaled for replicas."""
        model, count = self.model, self.count
        counted = {} if count is None else {"num_items_in_batch": count}
        output = self.call(**self.local, **self.others, **counted)
        output.loss = _of_replica(model, output.loss, is_counted=count is not None)
        if model.training:
            return output
        if count is None:
            count = _everywhere(model, (self.local["shift_labels"] != IGNORED).sum())
        if not count:
            output.loss = output.loss * torch.nan  # 0/0, as on one process
        return output

    def logits(self) -> Any:
        """Return the logits of the whole batch, and with labels their evaluation loss."""
        model, local = self.model, dict(self.local)
        targets = local.pop("shift_labels", None)
        of_tree = local.pop("tree_targets", None)
        output: Any = self.call(**local, **self.others)
        if targets is not None:
            loss = _loss_of(model, output, targets, self.count, of_tree)
            kind: Any = (
                MoeCausalLMOutputWithPast
                if "aux_loss" in output
                else CausalLMOutputWithPast
            )
            output = kind(
                loss=_of_replica(model, loss, is_counted=self.count is not None),
                **output,
            )
        logits = (
            output.logits.float() if model.ring_autocast is not None else output.logits
        )
        output.logits = (
            self._gathered(logits)
            if self.shared is None
            else self.shared.of_tokens(logits)
        )
        return output

    def _gathered(self, part: Tensor) -> Tensor:
        """Gather what the ranks have of each token of the whole batch."""
        tokens = self.whole["input_ids"].shape[1]
        return gathered_tokens(
            self.model, part, tokens, self.local.get("document_lengths")
        )


def _counted(number: Any) -> int | None:
    if number is None:
        return None
    value = number.item() if isinstance(number, Tensor) else number
    if int(value) != value:
        raise UnsupportedError(
            f"num_items_in_batch={value} is no whole number; give a number of targets"
        )
    return int(value)


def _of_replica(model: Any, loss: Tensor, *, is_counted: bool) -> Tensor:
    """Scale a loss's value and gradient for R replicas.

    FSDP divides gradients by R, and callers multiply a loss with counted targets by R.
    """
    replicas = model.ring_mesh.get_group("replicate").size()
    if replicas == 1:
        return loss
    value, gradient = (1 / replicas, 1) if is_counted else (1, replicas)
    return loss.detach() * value + (loss - loss.detach()) * gradient


def _loss_of(
    model: Any, output: Any, targets: Tensor, count: int | None, of_tree: Tensor | None
) -> Tensor:
    """Compute the evaluation loss over all replicas from local logits (B, T, V); NaN without targets."""
    of_tokens = Targets(targets, of_tree)
    logits = of_tokens.predicted_by(output.logits).float()
    losses = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).detach()
    weights = of_tokens.times
    sums = _everywhere(
        model, torch.stack(((losses * weights).double().sum(), weights.double().sum()))
    )
    loss = (sums[0] / (sums[1] if count is None else count)).to(losses.dtype)
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + getattr(model, model.ring_router.coefficient) * output.aux_loss
    return loss


def _everywhere(model: Any, numbers: Tensor) -> Tensor:
    for axis in ("ring", "replicate"):
        if model.ring_mesh.get_group(axis).size() > 1:
            dist.all_reduce(numbers, group=model.ring_mesh.get_group(axis))
    return numbers


def _without_last(output: Any) -> Any:
    """Drop the last token's entry, as TRL's head does for labels that it shifts itself."""
    for name, value in output.items():
        if isinstance(value, Tensor) and value.ndim == 2:
            output[name] = value[:, :-1]
    return output


def take_fused_forward(model: nn.Module) -> Callable[..., Any] | None:
    """Remove and return the forward set by ``add_fused_lm_head``, or None; on a ring it would call the old forward."""
    forward: Any = vars(model).get("forward")
    if "fused_lm_head" not in getattr(
        getattr(forward, "__code__", None), "co_varnames", ()
    ):
        return None
    del model.forward
    return forward.__func__


def fused_output(
    model: RingModel,
    call: Callable[..., Any],
    gathered: Callable[[Tensor], Tensor],
    count: int | None,
) -> object:
    """Return TRL's ``FusedCausalLMOutput``, (B, S) in the whole batch's order on every rank.

    ``call``: the ring's pass of the local batch; ``count``: targets to divide the loss by, None for the batch's.
    """
    forward: Any = getattr(vars(model).get("forward"), "__func__", None) or vars(
        model
    ).get("ring_fused_forward")
    if forward is None:
        raise UnsupportedError(
            "fused_lm_head=True: this model has no fused head; call trl's add_fused_lm_head first"
        )
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
    values |= {
        name: values[name].detach() > 0.5
        for name in ("is_top1", "label_mask")
        if name in values
    }
    values |= {
        name: values[name].detach()
        for name in ("log_sum_sq_probs", "mean_logits")
        if name in values
    }
    total = values["label_mask"].sum().clamp(min=1) if count is None else count
    return kind(
        loss=-values["log_probs"].sum() / total,
        aux_loss=getattr(output, "aux_loss", None),
        **values,
    )


def _per_token(
    forward: Callable[..., Any],
    found: list[Any],
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
) -> Tensor:
    """Run TRL's forward on local hidden states; concatenate its results as (B, T, fields)."""
    in_place = SimpleNamespace(
        base_model=lambda **_: SimpleNamespace(last_hidden_state=hidden),
        get_output_embeddings=model.get_output_embeddings,
    )
    # The ring computes the load-balancing loss, over the tokens of all ranks.
    output = forward(
        in_place,
        fused_lm_head=True,
        shift_labels=targets.long(),
        output_router_logits=False,
    )
    names = [name for name in FIELDS if getattr(output, name) is not None]
    found[:] = type(output), names
    return torch.stack([getattr(output, name).float() for name in names], -1)


def classifies(model: nn.Module) -> bool:
    """Return True for a classifier on a ring, also inside adapters."""
    return isinstance(base_of(model), RingClassifier)


def classified(
    model: RingModel, call: Callable[..., Any], kwargs: dict[str, Any]
) -> object:
    """Run the whole batch of a classifier: logits (B, L), or (B, S, L) for tokens, on all ranks.

    With labels also a loss.

    Classifiers take a mean; if Trainer has counted targets, it multiplies by the count, so the loss is 1/R of the mean.
    """
    whole = {name: kwargs.pop(name) for name in TAKEN if name in kwargs}
    labels, count = whole.pop("labels", None), kwargs.pop("num_items_in_batch", None)
    kwargs.pop(
        "margin", None
    )  # TRL's reward trainer passes all of its batch to the model
    with preparing(model.ring_mesh, "a forward pass"):
        if labels is not None and not pools(model):
            refuse_targets_of_padding(
                labels != IGNORED, real_tokens(whole), "labels", 0
            )
        least, shared = model.ring_min_shared, None
        if least is None:
            local = shard_batch(whole, model.ring_mesh, layout=model.ring_layout)
        else:
            ends = ends_of(model, whole["input_ids"], real_tokens(whole))
            shared = SharedRows(model, whole | {"shift_labels": ends}, least)
            local, kwargs["ring_asked"] = shared.local, Asked.ENDS
    output = call(**local, **kwargs)
    logits: Tensor = (
        output.logits.float() if model.ring_autocast is not None else output.logits
    )
    if shared is not None:
        logits = shared.of_targets(logits).sum(1)
    if not pools(model):
        length, lengths = whole["input_ids"].shape[1], local.get("document_lengths")
        # Losses view the logits as flat.
        logits = gathered_tokens(model, logits, length, lengths).contiguous()
    output.logits = logits
    if labels is None:
        return output
    if pools(model):
        loss = model.loss_function(
            logits=logits, labels=labels, pooled_logits=logits, config=model.config
        )
    else:
        loss = model.loss_function(logits, labels, model.config)
    if count is not None:
        loss = loss / model.ring_mesh.get_group("replicate").size()
    return type(output)(loss=loss, logits=logits)
