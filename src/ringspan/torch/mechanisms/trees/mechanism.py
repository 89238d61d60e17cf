"""Trees of segments, as the base sees them."""

from collections.abc import Mapping
from typing import Any, Final

from ringspan.core import mechanisms
from ringspan.core.errors import UnsupportedError
from ringspan.torch.mechanisms.trees.batch import SEGMENTS, shard_segments
from ringspan.torch.model.attention.own import uses_alibi
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring
from ringspan.torch.model.mechanism import Mechanism, Sharding

_SHOWN: Final = "a tree of segments"


class TreesMechanism(Mechanism):
    name = mechanisms.TREES
    keys = SEGMENTS

    def found_in_batch(self, batch: Mapping[str, Any], how: Sharding) -> str:
        return "" if SEGMENTS.isdisjoint(batch) else _SHOWN

    def shard(self, batch: Mapping[str, Any], how: Sharding) -> dict[str, Any] | None:
        return None if SEGMENTS.isdisjoint(batch) else shard_segments(batch, how)

    def check(self, model: RingModel, batch: Mapping[str, Any]) -> None:
        lengths = batch.get("document_lengths")
        if lengths is None or lengths.ndim != 3:
            return
        name = class_name(model)
        mechanisms.refuse_pairs(model.ring_found | {self.name: _SHOWN}, name)
        if uses_alibi(decoder_on_ring(model)):
            raise UnsupportedError(
                f"{name}: {_SHOWN} does not go with ALiBi, which counts distances in the row; give it separate rows"
            )
