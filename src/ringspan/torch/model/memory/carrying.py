"""Checkpointed layers whose recomputation belongs to the pass that they were first computed in."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ringspan.torch.engine.recurrence.current import Record, current_pass, passing
from ringspan.torch.model.layers.switches import Switches


def carried(
    checkpoint: Callable[..., Any], switches: Switches, *, keeps: bool
) -> Callable[..., Any]:
    """Wrap a layer's checkpoint function so that recomputation belongs to its original pass.

    With ``keeps``, recomputation reuses recorded states. ``switches`` are the layer's.
    """

    def checkpoint_in_pass(function: Callable[..., Any], *args: object) -> object:
        """Checkpoint a layer, whose later runs take the switches and sequences of this one."""
        if not torch.is_grad_enabled():  # nothing is computed again
            return checkpoint(function, *args)
        sequences, as_then = current_pass(), switches.noted()
        if sequences is not None and keeps:
            sequences = replace(sequences, record=Record())
        is_again = False

        def in_pass(*args: object) -> object:
            nonlocal is_again
            if not is_again and not keeps:
                # The layer runs in its pass, whose switches and sequences are the present ones.
                is_again = True
                return function(*args)
            if sequences is not None and sequences.record is not None:
                sequences.record.begin()
            with as_then(), passing(sequences):
                return function(*args)

        return checkpoint(in_pass, *args)

    return checkpoint_in_pass


def carry_passes(layers: Iterable[Any], *, keeps: bool) -> None:
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            checkpoint = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = carried(
                checkpoint, Switches(layer), keeps=keeps
            )
