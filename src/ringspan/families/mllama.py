"""Mllama: some layers attend only to an image's features and keep no keys of the text."""

from typing import Any, Final

from ringspan.torch.model.layers.family import Family


def _keyless_layers(config: Any) -> tuple[int, ...]:
    return tuple(config.cross_attention_layers or ())


FAMILIES: Final = (
    Family(
        name="Mllama",
        types=("mllama_text_model",),
        keyless_layers=_keyless_layers,
    ),
)
