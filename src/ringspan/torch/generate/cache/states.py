"""Cached states and convolutions of C channels and K taps, whole on every rank."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.attention.cached import current_turn
from ringspan.torch.engine.recurrence.current import current_pass
from ringspan.torch.generate.cache.pools import Tail, last_inputs


class Rearranged:
    @cached_property
    def kept(self) -> dict[str, Tail]:
        """Inputs and entries of windows of tokens, by name."""
        return {}

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of dimension 0 to all that is held."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._rearrange(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rearrange(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rearrange(lambda x: x[indices.to(x.device)])

    def _rearrange(self, function: Callable[[Tensor], Tensor]) -> None:
        self.change(function)
        for each in self.kept.values():
            each.change(function)


class StateLayer(Rearranged, LinearAttentionLayer):
    """Convolutions' last inputs and states of a layer, the same on every rank of a ring."""

    is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._held)

    @property
    def _held(self) -> list[Tensor]:
        return [
            x
            for x in (*self.conv_states.values(), *self.recurrent_states.values())
            if x is not None
        ]

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Keep the last inputs of all new tokens, given this rank's (B, C, T); return them for the convolution."""
        turn, sequences = current_turn(), current_pass()
        if turn is None or sequences is None or sequences.before is None:
            raise UnsupportedError(
                "a RingCache is for the model on the ring that made it; give others their own cache"
            )
        assert conv_kernel_size is not None, "every module that calls this says so"
        held = (
            self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        )
        state = self.recurrent_states.get(state_idx) if held is not None else None
        sequences.before.inputs, sequences.before.state = held, state
        last = last_inputs(conv_states, conv_kernel_size, turn)
        if held is None:
            held = last.new_zeros((*last.shape[:-1], conv_kernel_size))
        self.dtype, self.device = conv_states.dtype, conv_states.device
        self.conv_states[state_idx] = torch.cat((held, last), -1)[
            ..., -conv_kernel_size:
        ].contiguous()
        self.conv_kernel_size[state_idx] = conv_kernel_size
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[
            state_idx
        ] = True
        return conv_states

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self, self.number_of_states)
        self.kept.clear()

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        for held in (self.conv_states, self.recurrent_states):
            held.update(
                {index: function(x) for index, x in held.items() if x is not None}
            )
