"""What an attention is asked for besides its tensors, as one value: how the operator's one text argument is made.

An operator of torch takes plain values. Text is one of them, traces as a constant, and is read once for each that
differs. Lengths are not part of it, since they would make every length another constant: padding is.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.names import CommDtypeName, GradientCommDtypeName, KernelName

_NUMBERS: Final = {"scale": float, "softcap": float, "padding": int, "key_padding": int}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention on the ring, but for its tensors and their slopes and sinks; ``ring_attention`` says what each
    field does, and has checked them.

    ``str(spec)`` is text that ``AttentionSpec.parse`` reads back, the same for equal specs.
    """

    scale: float
    """Factor on the scores."""
    softcap: float = 0.0
    """0 for none."""
    mask: str = "causal"
    """``Mask.spec``."""
    layout: str = "zigzag"
    """A name, or ``CustomLayout.spec``."""
    key_layout: str = ""
    """Where the keys live if that is another ``CustomLayout.spec``."""
    padding: int = 0
    """Positions at the end of the padded sequence of queries that are no tokens."""
    key_padding: int = 0
    """The same of the keys' sequence."""
    route: str = "ring"
    """Any but ``auto``."""
    comm_dtype: CommDtypeName = "exact"
    gradient_comm_dtype: GradientCommDtypeName = "exact"
    kernel: KernelName = "auto"
    group: str = ""
    """Name of the process group, as torch's functional collectives have it; empty for a single process."""

    def __str__(self) -> str:
        # No loop over the fields: torch.compile traces this.
        return (
            f"scale={self.scale!r} softcap={self.softcap!r} mask={self.mask} layout={self.layout} "
            f"key_layout={self.key_layout} "
            f"padding={self.padding} key_padding={self.key_padding} route={self.route} comm_dtype={self.comm_dtype} "
            f"gradient_comm_dtype={self.gradient_comm_dtype} kernel={self.kernel} group={self.group}"
        )

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> "AttentionSpec":
        """Read what ``str`` has written."""
        # No value but the last one, the group's name, has blanks.
        parts = (part.partition("=") for part in text.split(" ", len(fields(AttentionSpec)) - 1))
        return AttentionSpec(**{name: _NUMBERS.get(name, str)(value) for name, _, value in parts})

    def layouts(self, tokens: int, key_tokens: int, ranks: int) -> tuple[Layout, Layout]:
        """Where queries and keys live, of which each rank has so many."""
        if self.layout.startswith("custom:"):
            return CustomLayout.parse(self.layout), CustomLayout.parse(self.key_layout or self.layout)
        return (
            Layout(self.layout, ranks * tokens - self.padding, ranks),  # pyright: ignore[reportArgumentType]
            Layout(self.layout, ranks * key_tokens - self.key_padding, ranks),  # pyright: ignore[reportArgumentType]
        )


def padding_of(layout: Layout) -> int:
    """Positions at the end of a layout's padded sequence that are no tokens."""
    # Asked this way, a compiled graph is for all lengths without padding, and not for one.
    return 0 if layout.length % layout.granularity == 0 else layout.padded_length - layout.length
