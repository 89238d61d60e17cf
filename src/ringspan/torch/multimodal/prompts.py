"""Images of a prompt: towers shared out over the ring, and all embeddings on every rank until the prompt is read.

B batch, n new tokens, R embeddings, in the order of their tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.torch.data.media import Media
from ringspan.torch.multimodal.token_types import Blocks, blocks_of, is_of
from ringspan.torch.multimodal.towers import Made, SharedTowers


class PromptImages(SharedTowers):
    """The images of new tokens (B, n) that are read over a cache, the same on every rank.

    Raises:
        UnsupportedError: the embeddings are others than the tokens that stand for some; on every rank alike.
    """

    def __init__(self, model: Any, media: Media) -> None:
        super().__init__(model)
        self.media = media
        self.blocks: list[Blocks] | None = blocks_of(self.kind, media, None)
        """The runs of tokens that see each other both ways."""
        self._made: dict[str, Made] = {}
        self._columns: Tensor | None = None
        """Of the new tokens, those that are read now."""
        for modality in self.kind.modalities:
            if modality.cut.pixels in media.inputs:
                self.add(modality, media.inputs, is_counted=True)
                with self.active() as inner:
                    getattr(inner, f"get_{modality.name}_features")()

    def features(self, name: str, compute: Callable[..., Any]) -> Any:
        """First all embeddings, which every rank keeps; then those of the tokens that are read."""
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
        numbers = (places.flatten().cumsum(0) - 1).view(places.shape)[:, self._columns]
        wanted = numbers[places[:, self._columns]]
        return made.placed(made.rows[wanted.to(made.rows.device)])

    def read(self, columns: Tensor, given: dict[str, Any]) -> Any:
        """What the model below the head gives for these of the new tokens, with images in their places."""
        self._columns = columns
        with self.active() as inner:
            return inner(**given | self.pixels(given["input_ids"].device))
