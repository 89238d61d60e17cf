"""A rank's reported progress, which the watchdog judges."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Place:
    count: tuple[int, int] = (0, 0)
    """Beats of its main thread and posted exchanges; a working rank raises them."""
    step: int = 0
    hop: int | None = None
    doing: str = "starting"
    patience_seconds: float = float("inf")
    process: tuple[str, int] | None = None
    changed: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def hear(self, message: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        count = int(message["count"][0]), int(message["count"][1])
        if count != self.count:
            self.count, self.changed = count, self.heard
        self.step, self.hop, self.doing = int(message["step"]), message["hop"], str(message["doing"])
        self.patience_seconds = float(message["patience_seconds"])
        self.process = str(message["machine"]), int(message["pid"])

    @property
    def is_waiting(self) -> bool:
        return self.patience_seconds < float("inf")

    def describe(self) -> str:
        hop = f", hop {self.hop}" if self.hop is not None else ""
        doing = f" ({self.doing})" if self.doing != "step" else ""
        return f"at step {self.step}{hop}{doing}"
