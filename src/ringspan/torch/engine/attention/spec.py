"""Non-tensor arguments of an attention as text, which torch traces as a constant: it has padding, but no lengths."""

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Final

from ringspan.core.codec import UNCHANGED, Codec, Sent
from ringspan.core.geometry.layout import CustomLayout, Layout
from ringspan.core.names import KernelName

_READERS: Final = {
    "scale": float,
    "softcap": float,
    "padding": int,
    "key_padding": int,
    "sent": Sent.parse,
}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Checked arguments of ``ring_attention``; ``parse`` reads ``str(spec)``, which is equal for equal specs."""

    scale: float
    softcap: float = 0.0
    """0 for none."""
    mask: str = "causal"
    """``Mask.spec``."""
    layout: str = "zigzag"
    """A name, or ``CustomLayout.spec``."""
    key_layout: str = ""
    """``CustomLayout.spec`` of the keys, if it differs."""
    padding: int = 0
    """Non-token positions at the end of the padded queries."""
    key_padding: int = 0
    """Non-token positions at the end of the padded keys."""
    route: str = "ring"
    """Never ``auto``."""
    sent: Sent = UNCHANGED
    kernel: KernelName = "auto"
    group: str = ""
    """Name of the process group in torch's functional collectives; empty for a single process."""

    def __str__(self) -> str:
        # No loop over the fields: torch.compile traces this.
        return (
            f"scale={self.scale!r} softcap={self.softcap!r} mask={self.mask} layout={self.layout} "
            f"key_layout={self.key_layout} "
            f"padding={self.padding} key_padding={self.key_padding} route={self.route} sent={self.sent.text} "
            f"kernel={self.kernel} group={self.group}"
        )

    @cached_property
    def text(self) -> str:
        """The same as ``str``, made once."""
        return str(self)

    @cached_property
    def sent_as(self) -> Codec:
        """The encoding of keys and values in messages."""
        return self.sent.codec

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> "AttentionSpec":
        # No value but the last one, the group's name, has blanks.
        parts = (
            part.partition("=")
            for part in text.split(" ", len(fields(AttentionSpec)) - 1)
        )
        return AttentionSpec(
            **{name: _READERS.get(name, str)(value) for name, _, value in parts}
        )

    def layouts(
        self, tokens: int, key_tokens: int, ranks: int
    ) -> tuple[Layout, Layout]:
        """Return the layouts of queries and keys, given the local lengths."""
        if self.layout.startswith("custom:"):
            return CustomLayout.parse(self.layout), CustomLayout.parse(
                self.key_layout or self.layout
            )
        return (
            Layout(self.layout, ranks * tokens - self.padding, ranks),  # pyright: ignore[reportArgumentType]
            Layout(self.layout, ranks * key_tokens - self.key_padding, ranks),  # pyright: ignore[reportArgumentType]
        )


def padding_of(layout: Layout) -> int:
    """Return the number of padding positions."""
    # A question about the remainder lets one compiled graph serve all lengths without padding.
    return (
        0
        if layout.length % layout.granularity == 0
        else layout.padded_length - layout.length
    )
