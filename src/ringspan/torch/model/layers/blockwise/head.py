"""Heads: a plain weight uses the blockwise loss; any other head is called on blocks of n tokens.

An adapter, hook, parametrization or custom forward makes a head more than its weight. It is called for each block, and
again in backward: full logits never exist, and every parameter it uses gets its gradient.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.core.names import ReductionName
from ringspan.torch.data.loss_blocks import LossOptions, slices
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.model.layers.blockwise.blocks import accumulate, mixes_tokens
from ringspan.torch.model.layers.modules import (
    computes_as,
    example_of,
    forward_of,
    hooks_of,
    local_part,
)
from ringspan.torch.model.layers.switches import Switches
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.weights.packed import is_packed
from ringspan.torch.runtime.autocast import autocast_now


def head_of(model: RingModel) -> nn.Module:
    """Return a model's head: its output embedding, or the modules after the decoder ending in it."""
    head: Any = model.get_output_embeddings()
    return joined(
        [model.get_submodule(name) for name in model.ring_head_parts] or [head]
    )


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def is_its_weight(head: nn.Module) -> bool:
    return computes_as(head, nn.Linear) and not is_packed(head.weight)  # pyright: ignore[reportArgumentType]


def current_copy(head: nn.Module) -> nn.Module:
    """Return the module that computes a head: PEFT's active copy (``modules_to_save``), or the original.

    Any other head is returned as it is. A head with hooks stays whole, so that its hooks run.
    """
    wrapper: Any = head
    is_wrapper = isinstance(getattr(head, "modules_to_save", None), nn.ModuleDict)
    if (
        not is_wrapper
        or hooks_of(head)
        or not forward_of(head).__module__.startswith("peft.")
    ):
        return head
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    return (
        wrapper.modules_to_save[active[0]]
        if active and active[0] in wrapper.modules_to_save
        else wrapper.original_module
    )


def in_dtype_for(head: Any, hidden: Tensor) -> Tensor:
    """Return hidden states in the wider dtype of theirs and the head's weight's, so that neither is rounded.

    Autocast has its own.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        return hidden
    return hidden.to(torch.promote_types(hidden.dtype, head.weight.dtype))


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """Return a head's output; its weight may be in another dtype than the hidden states, as in the blockwise loss."""
    plain: Any = current_copy(head)
    is_cast = torch.is_autocast_enabled(hidden.device.type) or not is_its_weight(plain)
    if is_cast or plain.weight.dtype == hidden.dtype:
        return head(hidden)
    hidden = in_dtype_for(plain, hidden)
    bias = None if plain.bias is None else local_part(plain.bias).to(hidden.dtype)
    return linear(hidden, local_part(plain.weight).to(hidden.dtype), bias)


def input_size(head: nn.Module) -> int:
    """Return C of a head, or of its inner linear layer; raise UnsupportedError without either."""
    linear = next(
        (part for part in head.modules() if isinstance(part, nn.Linear)), None
    )
    if linear is None:
        raise UnsupportedError(
            f"the head ({type(head).__name__}) has no linear layer; use one that has"
        )
    return linear.in_features


@torch.no_grad()
def output_size(head: nn.Module) -> int:
    head = current_copy(head)
    if is_its_weight(head):
        return head.weight.shape[0]  # pyright: ignore[reportIndexIssue, reportReturnType]
    like = example_of(head)
    return head(
        torch.zeros(1, 1, input_size(head), dtype=like.dtype, device=like.device)
    ).shape[-1]


def refuse_mixing(head: nn.Module) -> None:
    """Try out a head that is more than its weight; UnsupportedError if it mixes tokens or is random."""
    head = current_copy(head)
    if is_its_weight(head):
        return
    reason = mixes_tokens(head, input_size(head), gives=output_size(head), trains=False)
    if reason:
        raise UnsupportedError(
            f"the head ({type(head).__name__}, its adapters and hooks) {reason}; remove what does"
        )


def refuse_blocks_of_vocabulary(head: nn.Module, chunk_vocabulary: int | None) -> None:
    """Raise UnsupportedError for blocks of the vocabulary of a called head, which gives all logits."""
    if chunk_vocabulary is not None and not is_its_weight(head):
        raise UnsupportedError(
            f"loss_chunk_vocabulary={chunk_vocabulary} needs a head that is its weight alone; this one "
            f"({type(head).__name__}) is called for all of its logits: leave it out"
        )


def kind_of_head(head: nn.Module) -> object:
    """Return a key of a head that changes when any hook or forward in it changes."""
    return tuple((forward_of(part), hooks_of(part)) for part in head.modules())


def called_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    options: LossOptions,
    reduction: ReductionName = "sum",
) -> Tensor:
    """Compute ``blockwise_cross_entropy`` of ``head(hidden)`` by calling the head on ``chunk_tokens`` tokens at a time.

    ``head``: (1, n, C) -> (1, n, V), token by token; hooks see each block again in backward, with the same dropout.
    UnsupportedError for ``chunk_vocabulary``, or a head that uses a result from outside which needs a gradient.
    """
    refuse_blocks_of_vocabulary(head, options.chunk_vocabulary)
    blocks = _Blocks(head, targets, options, hidden.device)
    if torch.is_grad_enabled():
        losses, leaves = blocks.losses_and_leaves(hidden)
        losses = _Called.apply(losses, hidden, blocks, *leaves)
    else:
        losses = blocks.losses(hidden)
    return (
        losses
        if reduction == "none"
        else losses.sum(dtype=torch.float64).to(losses.dtype)
    )


class _Blocks:
    """Blockwise losses of a sequence, with the autocast, switches and random state they were computed under."""

    def __init__(
        self,
        head: nn.Module,
        targets: Tensor,
        options: LossOptions,
        device: torch.device,
    ) -> None:
        self._head, self._targets, self._options, self._device = (
            head,
            targets,
            options,
            device,
        )
        self._autocast, self._as_then = (
            autocast_now(device.type),
            Switches(head).noted(),
        )
        self._random = (
            torch.get_rng_state(),
            *get_device_states(torch.empty(0, device=device)),
        )

    def losses(self, hidden: Tensor) -> Tensor:
        return _cat(
            [self._losses(hidden[rows], rows) for rows in self._slices(hidden)],
            hidden.device,
        )

    def losses_and_leaves(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the losses and all parameters they depend on: the head's, on every rank, and hooks'."""
        leaves = {id(p): p for p in self._head.parameters() if p.requires_grad}
        parts: list[Tensor] = []
        for rows in self._slices(hidden):
            chunk = hidden[rows].detach().requires_grad_(hidden.requires_grad)
            # Autograd numbers operations in order: one with a lower number than this was computed before the block.
            now = torch.zeros((), requires_grad=True).neg().grad_fn
            losses = self._losses(chunk, rows)
            leaves |= {
                id(leaf): leaf
                for leaf in _leaves(losses, since=now)
                if leaf is not chunk
            }
            parts.append(losses.detach())
        return _cat(parts, hidden.device), list(leaves.values())

    def gradients(
        self,
        hidden: Tensor,
        leaves: Sequence[Tensor],
        d_losses: Tensor,
        *,
        of_hidden: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of hidden states (T, C), None unless ``of_hidden``, and of ``leaves``, block by block.

        Each block is recomputed under the autocast, switches and random state of forward; sums over blocks are in
        float32.
        """
        sums: list[Tensor | None] = [None] * len(leaves)
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        state, devices, states = self._random
        # A head with dropout must drop the same entries again, without advancing the caller's random numbers.
        random = torch.random.fork_rng(devices, device_type=self._device.type)
        with random, torch.enable_grad(), self._as_then():
            torch.set_rng_state(state)
            if devices:
                set_device_states(devices, states, device_type=self._device.type)
            for rows in self._slices(hidden):
                chunk = hidden[rows].detach().requires_grad_(d_hidden is not None)
                with self._autocast():
                    losses = self._losses(chunk, rows)
                wanted = [chunk, *leaves] if d_hidden is not None else list(leaves)
                parts: list[Tensor | None] = [None] * len(wanted)
                # Some blocks need no gradient, for example one without targets.
                if losses.requires_grad:
                    d_block = d_losses[rows].to(losses.dtype)
                    parts = list(
                        torch.autograd.grad(losses, wanted, d_block, allow_unused=True)
                    )
                del losses
                if d_hidden is not None:
                    d_chunk = parts.pop(0)
                    d_hidden[rows] = 0 if d_chunk is None else d_chunk
                accumulate(sums, parts)
        # A leaf that no block used gets zeros, because FSDP reduces the same parameters on every rank.
        found = (
            torch.zeros_like(leaf) if s is None else s.to(leaf.dtype)
            for s, leaf in zip(sums, leaves, strict=True)
        )
        return [d_hidden, *found]

    def _slices(self, hidden: Tensor) -> Iterator[slice]:
        return slices(len(hidden), self._options.chunk_tokens)

    def _losses(self, chunk: Tensor, rows: slice) -> Tensor:
        return token_cross_entropy(
            self._head(chunk[None])[0], self._targets[rows], self._options
        )


def token_cross_entropy(
    products: Tensor, targets: Tensor, options: LossOptions
) -> Tensor:
    """Compute the per-token loss of ``blockwise_cross_entropy`` from a head's output, (n, V) -> (n,)."""
    logits = products if products.dtype == torch.float64 else products.float()
    logits = logits * options.logit_scale if options.logit_scale != 1 else logits
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    # Log-probabilities in 16 bits would be the loss's largest error.
    with torch.autocast(logits.device.type, enabled=False):
        losses = cross_entropy(
            logits,
            targets,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=options.label_smoothing,
        )
        if options.z_loss:
            losses = losses + options.z_loss * logits.logsumexp(-1).square() * (
                targets != IGNORED
            )
    return losses


class _Called(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, hidden: Tensor, blocks: _Blocks, *leaves: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        # Not by save_for_backward: FSDP frees the leaves' memory after forward and fills it again before backward.
        ctx.blocks, ctx.leaves = (
            blocks,
            leaves,
        )
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [hidden], [d_losses] = ctx.saved_tensors, gradients
        d_hidden, *others = ctx.blocks.gradients(
            hidden, ctx.leaves, d_losses, of_hidden=ctx.needs_input_grad[1]
        )
        return None, d_hidden, None, *others


def _cat(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(losses) if losses else torch.zeros(0, device=device)


def _leaves(losses: Tensor, since: Any) -> list[Tensor]:
    """Return a value's parameters since the operation ``since``; raise for earlier results."""
    found: list[Tensor] = []
    waiting = [losses.grad_fn] if losses.grad_fn is not None else []
    seen: set[Any] = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
            continue
        if node._sequence_nr() < since._sequence_nr():
            raise UnsupportedError(
                f"the head uses a tensor with a gradient that was computed before it was called ({node.name()}), which "
                "its blocks cannot share; detach it"
            )
        nexts = {
            following for following, _ in node.next_functions if following is not None
        } - seen
        seen |= nexts
        waiting += nexts
    return found


def vocabularies(model: PreTrainedModel) -> tuple[int, int]:
    """Return the vocabulary sizes of the input embedding and of the head; 0 if absent."""
    given: Any = model.get_input_embeddings()
    # An adapter wraps the embedding; only the table inside it has the number of entries.
    table = next(
        (part for part in given.modules() if isinstance(part, nn.Embedding)), given
    )
    head: Any = model.get_output_embeddings()
    return table.weight.shape[0], 0 if head is None else output_size(head)
