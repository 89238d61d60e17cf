"""A decoder's pass over local tokens to hidden states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import Blocks, Segments
from ringspan.torch.attention.traced import ends_of, rows_of
from ringspan.torch.data.batch import positions_of
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.data.media import Media
from ringspan.torch.layers.modules import class_name
from ringspan.torch.layers.numbering import counts_real_tokens, told
from ringspan.torch.layers.positions import note_length
from ringspan.torch.layers.rope import set_global_length
from ringspan.torch.layers.view import RingModel, decoder_on_ring
from ringspan.torch.memory.folds import Fold
from ringspan.torch.model.recurrent import starts_of
from ringspan.torch.multimodal.kinds import blocks_of
from ringspan.torch.multimodal.towers import find_pass
from ringspan.torch.recurrence.current import IndexLoss, SequencePass, passing


def local_hidden_states(
    model: RingModel, input_ids: Tensor, position_ids: Tensor, longest: int, document_lengths: Tensor | None,
    media: Media | None, fold: Fold | None = None, index_loss: IndexLoss | None = None,
) -> Tensor:  # fmt: skip
    """Compute hidden states (B, T, C) of local tokens (B, T); ``longest``: tokens of the longest document, unpadded."""
    decoder = decoder_on_ring(model)
    if document_lengths is not None and counts_real_tokens(decoder):
        ring = model.ring_axis
        folds, number = model.ring_folds if fold else 1, fold.number if fold else 0
        length = position_ids.shape[1] * ring.size() * folds
        split = BatchLayout.of(
            model.ring_layout, length, ring.size(), document_lengths, folds
        )
        inside = positions_of(
            split, ring.get_local_rank(), document_lengths, len(document_lengths)
        )
        position_ids = inside.to(position_ids).chunk(folds, 1)[number]
    set_global_length(decoder, longest)
    if model.training:
        _note_length(model, longest)
    blocks = None
    if media is not None and model.ring_media is not None:
        blocks = blocks_of(model.ring_media, media, document_lengths)
    packed = None
    if document_lengths is not None or blocks is not None:
        packed = Packed(model, document_lengths, position_ids, blocks)
    others: dict[str, Any] = {"ring_packed": packed} if packed else {}
    if model.ring_router is not None:
        # The router loss records the scores itself, so transformers need not return them.
        others["output_router_logits"] = False
    # A compiled program cannot read the current pass, and does not need to: layers with a state are never compiled.
    sequences = (
        None
        if model.ring_compiled
        else _sequences(model, position_ids.shape[1], packed, fold, index_loss)
    )
    seen = find_pass(model, media, position_ids.shape[1], document_lengths)
    with passing(sequences):
        # Padding has positions after the end, which a learned table may not have.
        positions = position_ids.clamp_max(longest - 1)
        given = {
            "input_ids": input_ids,
            "position_ids": positions,
            "use_cache": False,
            **others,
        }
        with told(decoder, given) as told_all:
            out: Any = decoder(**told_all) if seen is None else seen.decode(told_all)
    if packed and not packed.is_seen:
        raise UnsupportedError(
            f"{class_name(model)} does not hand its keyword arguments on to attention, so "
            "packed documents would see each other; give it one document a sequence"
        )
    return out.last_hidden_state


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
def _sequences(
    model: RingModel,
    tokens: int,
    packed: Packed | None,
    fold: Fold | None,
    index_loss: IndexLoss | None,
) -> SequencePass:
    """Return the pass that layers with a state and folds read: each row's layout, the ring and documents' starts."""
    ring = model.ring_axis
    split = BatchLayout((fold.layout,)) if fold is not None else packed and packed.split
    split = split or BatchLayout.of(
        model.ring_layout, tokens * ring.size(), ring.size(), None
    )
    starts = ((0,),)
    if packed is not None and packed.lengths is not None:
        starts = tuple(starts_of([row for row in packed.rows if row])) or starts
    return SequencePass(
        split.rows, ring.get_group(), starts, packed, fold=fold, index_loss=index_loss
    )


# Compiled code cannot log.
@torch.compiler.disable()
def _note_length(model: RingModel, length: int) -> None:
    note_length(model, length, says=model.ring_axis.get_local_rank() == 0)
