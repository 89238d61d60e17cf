"""Images, videos and sound, as the base sees them; ``ringspan.torch.mechanisms.media`` computes them."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core import mechanisms
from ringspan.core.step_config import StepConfig
from ringspan.torch.data.media.inputs import MEDIA, media_of
from ringspan.torch.mechanisms.media.checks import check_media
from ringspan.torch.mechanisms.media.kinds import blocks_of, kind_of
from ringspan.torch.mechanisms.media.towers import find_pass, put_towers_on_ring
from ringspan.torch.model.layers.view import ModelView, RingModel
from ringspan.torch.model.local_pass import LocalPass
from ringspan.torch.model.mechanism import Mechanism


class MediaMechanism(Mechanism):
    name = mechanisms.MEDIA
    keys = MEDIA

    def found_in(self, view: ModelView, config: StepConfig) -> str:
        return "towers that see or hear" if view.towers else ""

    def prepare(
        self, view: ModelView, config: StepConfig, mesh: DeviceMesh
    ) -> list[nn.Module]:
        kind = kind_of(view)
        if kind is None:
            return []
        attention: Any
        for attention in view.decoder.modules() if kind.is_prefix else ():
            # Attention is causal except in the prompt, which the mask defines.
            attention.is_causal = True
        return put_towers_on_ring(view, kind, checkpointed=config.checkpoint != "none")

    def attributes(self, view: ModelView) -> dict[str, Any]:
        return {"ring_media": kind_of(view)}

    def added(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        media = media_of(batch)
        return ({}, []) if media is None else ({"media": media}, [media.digest])

    def check(self, model: RingModel, batch: Mapping[str, Any]) -> None:
        lengths = batch.get("document_lengths")
        check_media(model, batch.get("media"), batch["input_ids"], lengths)

    def begin(self, now: LocalPass) -> None:
        media, lengths, kind = (
            now.given.get("media"),
            now.document_lengths,
            now.model.ring_media,
        )
        if media is not None and kind is not None:
            now.blocks = blocks_of(kind, media, lengths)
        seen = find_pass(now.model, media, now.position_ids.shape[1], lengths)
        if seen is not None:
            now.decode = seen.decode
