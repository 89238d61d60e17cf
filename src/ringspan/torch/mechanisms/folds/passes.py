"""Passes over a sequence in folds: a rank computes one after the other and keeps only its input.

Forward goes from the first fold to the last, without autograd: a fold's tokens see keys and values of earlier folds.
Backward goes from the last to the first, and recomputes each before its backward pass. Gradients of earlier folds' keys
and values are accumulated until those folds run (``ringspan.torch.mechanisms.folds.attention``). FSDP gathers the
weights for each fold, and sums its gradients over the ranks.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.core.geometry.folds import fold_layouts
from ringspan.torch.mechanisms.folds.attention import Fold, Folds
from ringspan.torch.model.consistency.fixed import calling_parts
from ringspan.torch.model.consistency.forward import agreeing, recovering
from ringspan.torch.model.consistency.loop_watch import in_call
from ringspan.torch.model.layers.switches import Switches
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.memory.segments import surroundings
from ringspan.torch.model.memory.sharding import settle, sharded_after_layers

# Arguments of a pass with one entry for each local token, beside a mechanism's own.
_OF_TOKENS: Final = ("input_ids", "position_ids", "shift_labels", "real_tokens")


def in_folds(
    model: RingModel, call: Callable[..., Any], arguments: dict[str, Any]
) -> Tensor:
    """Return the differentiable loss of a pass in folds, or its numbers of each local token.

    Args:
        model: a ``RingCausalLM``.
        call: its pass over some tokens, which gathers weights.
        arguments: of a pass over all local tokens, checked.
    """
    trains = torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in model.parameters()
    )
    run = _Pass(model, call, arguments, trains=trains)
    if not trains:
        return run.forward()
    return _Folded.apply(torch.zeros((), requires_grad=True), run)


class _Folded(torch.autograd.Function):
    """One node for a whole pass; parameters get their gradients inside of its backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: "_Pass") -> Tensor:
        ctx.run = run
        return run.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError(
                "a pass in folds is differentiated once; compute the loss again"
            )
        run.backward(gradients[0])
        return None, None


class _Pass:
    """A pass in folds, with the switches and random states that its backward needs."""

    def __init__(
        self,
        model: RingModel,
        call: Callable[..., Any],
        arguments: dict[str, Any],
        *,
        trains: bool,
    ) -> None:
        """Cut the local tokens of ``arguments`` into equal folds, and note the model's switches for backward."""
        self._model, self._call, self._arguments, self._trains = (
            model,
            call,
            arguments,
            trains,
        )
        ring, step = model.ring_axis, model.ring_step
        tokens = arguments["input_ids"].shape[1]
        self._tokens = tokens // step.folds
        layouts = fold_layouts(
            step.layout, ring.size() * tokens, ring.size(), step.folds
        )
        keeps = trains and step.checkpoint != "full"
        self._folds = Folds(layouts, step.offload, keeps_results=keeps, trains=trains)
        self._as_then: list[Callable[[], Any]] = []
        self._switches = Switches(model).noted()

    def forward(self) -> Tensor:
        """Return the sum of the folds' losses, or the numbers of all tokens."""
        found: list[Tensor] = []
        with torch.no_grad():
            for number in range(len(self._folds.layouts)):
                if self._trains:
                    self._as_then.append(surroundings(self._arguments["input_ids"]))
                found.append(self._compute(number, is_again=False))
        settle(self._model)
        return torch.cat(found, 1) if found[0].ndim else torch.stack(found).sum()

    def backward(self, gradient: Tensor) -> None:
        """Recompute each fold, last to first, and run its backward pass; parameters accumulate their gradients.

        ``gradient``: of the whole result, a number for a loss or (B, T, ...) for numbers of tokens. Later folds go
        first because they add to the gradients of earlier folds' keys and values.
        """
        for number in reversed(range(len(self._folds.layouts))):
            with (
                in_call("a backward pass"),
                recovering(self._model),
                calling_parts("a backward pass"),
            ):
                sharding = sharded_after_layers(self._model)
                same_batch, as_then = (
                    agreeing(self._model, self._arguments),
                    self._as_then[number],
                )
                with (
                    torch.enable_grad(),
                    self._switches(),
                    as_then(),
                    same_batch,
                    sharding,
                ):
                    found = self._compute(number, is_again=True)
                own = gradient[:, self._part(number)] if gradient.ndim else gradient
                torch.autograd.backward(found, own.to(found.dtype))
            del found

    def _compute(self, number: int, *, is_again: bool) -> Tensor:
        part = self._part(number)
        of_tokens = set(_OF_TOKENS).union(
            *(each.of_tokens for each in self._model.ring_mechanisms)
        )
        arguments = {
            name: value[:, part] if name in of_tokens else value
            for name, value in self._arguments.items()
        }
        output = self._call(**arguments, ring_fold=Fold(self._folds, number, is_again))
        return output.logits if output.loss is None else output.loss

    def _part(self, number: int) -> slice:
        return slice(number * self._tokens, (number + 1) * self._tokens)
