"""Modifications of q . k before the softmax, other than the mask: scale, soft cap, ALiBi."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Scores ``s = scale q . k``, then ``softcap tanh(s / softcap)`` (Gemma 2), then ``s - slope |p - p'|`` (ALiBi).

    p, p' are global positions (Press et al. 2022). ``slopes`` (H,) float32, one per query head; with them
    ``query_positions`` (rows,) and ``key_positions`` (keys,) int64 are set, for a tile.
    """

    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None

    @property
    def beyond_plain(self) -> str | None:
        """Return why a kernel that masks, then only scales, cannot compute them; None if it can."""
        return "it has no softcap and no ALiBi slopes" if self.softcap or self.slopes is not None else self.lifts_masked

    @property
    def lifts_masked(self) -> str | None:
        """Return why a kernel that masks before scaling cannot serve: -inf would not stay lowest; else None."""
        return None if self.scale > 0 else f"it needs a scale above 0, this is {self.scale}"

    def heads(self, heads: slice) -> "Scores":
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])
