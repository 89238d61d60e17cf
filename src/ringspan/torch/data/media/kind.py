"""Kinds of images and sound: the inputs that a model that sees or hears takes of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ringspan.torch.data.media import cuts


class Modality(NamedTuple):
    name: str  # name in errors; ``get_NAME_features`` is the tower
    cut: cuts.Cut

    @property
    def token_field(self) -> str:
        return f"{self.name}_token_id"


class Kind(NamedTuple):
    modalities: tuple[Modality, ...]
    # input whose tokens of type ``block_type`` see each other both ways
    blocks: str | None = None
    block_type: int = 1
    # True if a document's block is its prefix, whatever window a layer has
    is_prefix: bool = False
    has_grid_positions: bool = False  # True if tokens have a time, row and column from ``get_rope_index`` (M-RoPE)
    others: tuple[str, ...] = ()  # further inputs
    features: Callable[..., Any] | None = None
    """Function of model and tower inputs, for models without a method; the ring then places embeddings."""

    @property
    def names(self) -> set[str]:
        named = {name for modality in self.modalities for name in modality.cut.names}
        return named | {*self.others} | ({self.blocks} if self.blocks else set())
