"""A decoder's pass over local tokens to hidden states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import Blocks, Segments
from ringspan.torch.data.batch import positions_of
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.targets import Targets
from ringspan.torch.engine.attention.traced import ends_of, rows_of
from ringspan.torch.engine.recurrence.current import SequencePart, SequencePass, passing
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.numbering import counts_real_tokens, told
from ringspan.torch.model.layers.positions import note_length
from ringspan.torch.model.layers.rope import set_global_length
from ringspan.torch.model.layers.router_loss import real_tokens_of
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring
from ringspan.torch.model.recurrent import starts_of


@dataclass
class LocalPass:
    """A pass over local tokens (B, T), as mechanisms see and change it before the decoder runs."""

    model: RingModel
    input_ids: Tensor
    position_ids: Tensor
    longest: int
    """Tokens of the longest document, unpadded."""
    document_lengths: Tensor | None
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the pass that only mechanisms read, by name."""
    real_tokens: Tensor | None = None
    wants_loss: bool = False
    """True if the pass is asked for the loss of targets."""
    targets: Targets | None = None
    count: int = 0
    """Targets of all ranks."""

    blocks: Sequence[Blocks] | None = None
    """Each row's blocks of tokens that see each other both ways."""
    decode: Callable[[dict[str, Any]], Any] | None = None
    """Runs the decoder on its arguments, in place of a call of it."""
    part: SequencePart | None = None
    """The part of the sequences that these tokens are; None if they are this rank's whole share."""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values that mechanisms keep for their layers during the pass, each under its name."""
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values that mechanisms add to the model's output."""

    @property
    def real(self) -> Tensor:
        """Mask (B, T) of local tokens that are not padding."""
        if self.real_tokens is None:
            self.real_tokens = real_tokens_of(
                self.model, self.position_ids, self.longest, self.document_lengths
            )
        return self.real_tokens


def local_hidden_states(now: LocalPass) -> Tensor:
    """Compute the hidden states (B, T, C) of a pass's tokens."""
    model, lengths = now.model, now.document_lengths
    decoder = decoder_on_ring(model)
    for each in model.ring_mechanisms:
        each.begin(now)
    positions = now.position_ids
    if lengths is not None and counts_real_tokens(decoder):
        positions = _positions_in_documents(now, lengths)
    set_global_length(decoder, now.longest)
    if model.training:
        _note_length(model, now.longest)
    packed = None
    if lengths is not None or now.blocks is not None:
        packed = Packed(model, lengths, positions, now.blocks)
    others: dict[str, Any] = {"ring_packed": packed} if packed else {}
    if model.ring_router is not None:
        # The router loss records the scores itself, so transformers need not return them.
        others["output_router_logits"] = False
    # A compiled program cannot read the current pass, and does not need to: layers with a state are never compiled.
    sequences = None if model.ring_compiled else _sequences(now, packed)
    with passing(sequences):
        given = {
            "input_ids": now.input_ids,
            # Padding has positions after the end, which a learned table may not have.
            "position_ids": positions.clamp_max(now.longest - 1),
            "use_cache": False,
            **others,
        }
        with told(decoder, given) as told_all:
            out: Any = (
                decoder(**told_all) if now.decode is None else now.decode(told_all)
            )
    if packed and not packed.is_seen:
        raise UnsupportedError(
            f"{class_name(model)} does not hand its keyword arguments on to attention, so "
            "packed documents would see each other; give it one document a sequence"
        )
    return out.last_hidden_state


def _positions_in_documents(now: LocalPass, lengths: Tensor) -> Tensor:
    """Return local positions (B, T) counted within documents, also if the batch's count over rows."""
    model, ring = now.model, now.model.ring_axis
    folds, number = (1, 0) if now.part is None else (model.ring_folds, now.part.number)
    length = now.position_ids.shape[1] * ring.size() * folds
    split = BatchLayout.of(model.ring_layout, length, ring.size(), lengths, folds)
    inside = positions_of(split, ring.get_local_rank(), lengths, len(lengths))
    return inside.to(now.position_ids).chunk(folds, 1)[number]


class Packed:
    """Documents or tree of each sequence, local positions, and blocks seen both ways, passed on to the layers."""

    def __init__(
        self,
        model: RingModel,
        lengths: Tensor | None,
        positions: Tensor,
        blocks: Sequence[Blocks] | None = None,
    ) -> None:
        """Derive each row's documents, blocks and layout from document ``lengths`` and local ``positions`` (B, T)."""
        # On the CPU, because every compiled layer reads them and would wait for the device.
        self.lengths = lengths = None if lengths is None else lengths.cpu()
        self.positions = positions
        # Set only if documents change the layout; otherwise the model's named layout holds.
        self.split: BatchLayout | None = None
        if model.ring_layout == "balanced" and lengths is not None:
            whole, ranks = int(ends_of(lengths).max()), model.ring_axis.size()
            self.split = BatchLayout.of(model.ring_layout, whole, ranks, lengths)
        rows: list[Segments | None] = [None] * len(blocks or ())
        if lengths is not None:
            rows = [*rows_of(lengths)]
        pairs = [*zip(rows, blocks or [()] * len(rows), strict=True)]
        # One entry serves all rows if they have the same documents and blocks.
        pairs = pairs[:1] if len(set(pairs)) == 1 else pairs
        self.rows, self.blocks = (
            [row for row, _ in pairs],
            [block for _, block in pairs],
        )
        self.is_seen = False


@torch.compiler.disable()
def _sequences(now: LocalPass, packed: Packed | None) -> SequencePass:
    """Return the pass that layers with a state and mechanisms read: each row's layout, the ring, documents' starts."""
    model, ring = now.model, now.model.ring_axis
    split = packed.split if packed is not None else None
    if now.part is not None:
        split = BatchLayout((now.part.layout,))
    elif split is None:
        tokens = now.position_ids.shape[1] * ring.size()
        split = BatchLayout.of(model.ring_layout, tokens, ring.size(), None)
    starts = ((0,),)
    if packed is not None and packed.lengths is not None:
        starts = tuple(starts_of([row for row in packed.rows if row])) or starts
    return SequencePass(
        split.rows,
        ring.get_group(),
        starts,
        packed,
        part=now.part,
        notes=now.notes,
    )


# Compiled code cannot log.
@torch.compiler.disable()
def _note_length(model: RingModel, length: int) -> None:
    note_length(model, length, says=model.ring_axis.get_local_rank() == 0)
