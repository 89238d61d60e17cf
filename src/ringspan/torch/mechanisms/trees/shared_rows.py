"""A batch whose rows share prefixes, as one tree of segments: a trainer's prompts are computed once for all answers.

B batch, S tokens of a row, R targets of the tree, N tokens of the tree, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.tree import shared_prefixes
from ringspan.core.names import BatchLayoutName
from ringspan.torch.data.batch import targets_of
from ringspan.torch.data.batch_layout import BatchLayout, Unsharded
from ringspan.torch.data.padding import IGNORED, real_tokens
from ringspan.torch.data.targets import whole_results
from ringspan.torch.mechanisms.trees.batch import Scored, shard_tree
from ringspan.torch.model.layers.positions import may_begin_anywhere
from ringspan.torch.model.layers.view import RingModel

_TAKEN: Final = frozenset({"input_ids", "attention_mask", "labels", "shift_labels"})


class SharedRows:
    """Rows of a whole batch, computed as the branches of a tree: each target counts as in its row."""

    def __init__(
        self,
        model: RingModel,
        whole: Mapping[str, Tensor],
        least: int,
        device: torch.device | None = None,
    ) -> None:
        """Build the tree of the rows' common prefixes of at least ``least`` tokens, and this rank's part of it.

        Raises:
            UnsupportedError: other keys, for example of packed documents; padding on the left if this model's positions
                count it.
        """
        if unknown := sorted(set(whole) - _TAKEN):
            raise UnsupportedError(
                f"shared_prefix=True takes rows of their own, and no {', '.join(unknown)}; leave packing, padding-free "
                "batches and images out, or shared_prefix"
            )
        real, ids = real_tokens(whole), whole["input_ids"]
        targets, device = targets_of(whole, real), device or ids.device
        keep = (
            torch.ones_like(ids, dtype=torch.bool).cpu() if real is None else real.cpu()
        )
        if not bool(keep[keep.any(1), 0].all()) and not may_begin_anywhere(model):
            raise UnsupportedError(
                "shared_prefix=True: this model's positions count padding on the left; pad on the right or leave it out"
            )
        full = keep.any(1).nonzero()[:, 0].tolist()
        tree, tokens, places = shared_prefixes(
            [ids[row].cpu().long()[keep[row]].numpy() for row in full], least
        )
        self.places = torch.zeros(ids.shape, dtype=torch.int64)
        for row, own in zip(full, places, strict=True):
            self.places[row, keep[row]] = torch.from_numpy(own)
        scored, self.length = None, len(tokens)
        if targets is not None:
            wanted = (targets != IGNORED).cpu()
            pairs = torch.stack((self.places[wanted], targets.cpu()[wanted]), 1)
            unique, inverse, counts = pairs.unique(
                dim=0, return_inverse=True, return_counts=True
            )
            self.count = len(unique)
            self.results = torch.full(ids.shape, self.count)
            self.results[wanted] = inverse
            scored = Scored(
                unique[:, 0], unique[:, 1], torch.arange(self.count), counts
            )
        self.group: Any = model.ring_axis.get_group()
        self.layout: BatchLayoutName = model.ring_layout
        row = torch.from_numpy(tokens)[None]
        self.local = shard_tree(row, tree, scored, model.ring_mesh, self.layout, device)
        # Dynamic rotary frequencies depend on a row's length, not on the tree's.
        self.local["sequence_length"] = torch.tensor(ids.shape[1])

    def of_targets(self, local: Tensor) -> Tensor:
        """Return results (B, S, ...) of the rows' targets from local ones (1, R, ...); 0 at tokens without a target."""
        whole = whole_results(
            local, self.local["tree_targets"], self.count + 1, self.group
        )
        return whole[0][self.results.to(local.device)]

    def of_tokens(self, local: Tensor) -> Tensor:
        """Return the rows' logits (B, S, V) from the local tokens'; logits of padding mean nothing."""
        split = BatchLayout.of(
            self.layout, self.length, self.group.size(), self.local["document_lengths"]
        )
        return Unsharded.apply(local, split, self.group)[0][
            self.places.to(local.device)
        ]
