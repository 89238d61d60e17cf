"""Images of a prompt: towers shared out over the ring, all embeddings on every rank until the prompt is read."""

# B batch, n new tokens, R embeddings, in token order.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ringspan.torch.data.media import Media
from ringspan.torch.multimodal.token_types import Blocks, blocks_of, is_of
from ringspan.torch.multimodal.towers import Made, SharedTowers


class PromptImages(SharedTowers):
    """Images of a prompt of ``rows`` and ``count`` new tokens over a cache, the same on every rank."""

    def __init__(self, model: Any, media: Media, rows: int, count: int) -> None:
        super().__init__(model)
        self.media, self._repeats = media, rows // len(media)
        self._behind = count - media.tokens.shape[1]
        blocks = blocks_of(self.kind, media, None)
        self.blocks: list[Blocks] | None = blocks and [row for row in blocks for _ in range(self._repeats)]
        """The runs of tokens of each sequence that see each other both ways."""
        self._made: dict[str, Made] = {}
        self._columns: Tensor | None = None
        """Of the new tokens, those that are read now."""
        for modality in self.kind.modalities:
            if modality.cut.pixels in media.inputs:
                self.add(modality, media.inputs, is_counted=True)
                with self.active() as inner:
                    self.asked(inner, modality.name)

    def features(self, name: str, compute: Callable[..., Any]) -> Any:
        """Return all embeddings at first, kept by every rank; then the embeddings of tokens being read."""
        work = self.works[name]
        places = is_of(self.model, work.modality, self.media.tokens)
        if name not in self._made:
            made = self.make(work, compute)
            by_rank = self.counted(work, made, places.sum(1).tolist())
            parts = [made.rows.new_empty((count, made.rows.shape[1])) for count in by_rank]
            parts[self.rank] = made.rows
            for rank, part in enumerate(parts):
                dist.broadcast(part, group_src=rank, group=self.group)
            self._made[name] = made._replace(rows=torch.cat(parts))
            return made.output
        assert self._columns is not None, "a turn says which"
        made = self._made[name]
        numbers = (places.flatten().cumsum(0) - 1).view(places.shape).masked_fill(~places, -1)
        numbers = pad(numbers, (0, self._behind), value=-1)[:, self._columns].repeat_interleave(self._repeats, 0)
        wanted = numbers[numbers >= 0]
        return made.placed(made.rows[wanted.to(made.rows.device)])

    def read(self, columns: Tensor, given: dict[str, Any]) -> Any:
        """Run the model below the head on these new tokens, with images in place."""
        self._columns = columns
        return self.decoded(given)
