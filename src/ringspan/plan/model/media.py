"""Contents of a sequence besides text, as ``ringspan plan`` takes them: images, video frames, sound."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ringspan.core.errors import ConfigError

OPTIONS: Final = {"image": "--images", "video": "--frames", "audio": "--sound"}
"""Options by modality."""
_FORM: Final = re.compile(r"(\d+)(?:x(\d+)x(\d+))?")
_MOST: Final = 1 << 30  # more is a typing error, as in ``search.MOST``


@dataclass(frozen=True)
class Units:
    option: str
    """Option that set them."""
    count: int
    size: tuple[int, int] | None = None
    """Height and width in pixels; None for the size that the model takes."""


Media = Mapping[str, Units]
NO_MEDIA: Final[Media] = MappingProxyType({})


def read_media(images: str | None, frames: str | None, sound: int | None) -> Media:
    """Parse each modality's part of a sequence: ``COUNT[xHEIGHTxWIDTH]`` images or frames, windows; or raise."""
    found: dict[str, Units] = {}
    for name, text in (("image", images), ("video", frames)):
        if text is not None:
            found[name] = _read(OPTIONS[name], text)
    if sound is not None:
        found["audio"] = Units(OPTIONS["audio"], sound)
    return found


def _read(option: str, text: str) -> Units:
    match = _FORM.fullmatch(text.strip().lower())
    numbers = [int(number) for number in match.groups() if number] if match else []
    if not numbers or not all(0 < number <= _MOST for number in numbers):
        raise ConfigError(
            f"{option} {text}: give COUNT, or COUNTxHEIGHTxWIDTH in pixels, such as 64x448x448"
        )
    return Units(
        option, numbers[0], (numbers[1], numbers[2]) if len(numbers) == 3 else None
    )
