"""What a run gives back, by itself: the launcher loads this module after the last step, and nothing slow with it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainResult:
    """What a finished run leaves: its folder, the last losses and what it was made of."""

    run: str
    model: str
    steps: int
    loss: float
    eval_loss: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None
    """The signal that ended the run early; it goes on when it is started again."""
