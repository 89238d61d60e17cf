"""Evaluation of long context: retrieval, tracing, aggregation, perplexity, and lm-eval's tasks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspan.evaluate.harness.lm import RingLM

__all__ = ["RingLM"]


def __getattr__(name: str) -> object:
    if name != "RingLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringspan.core.messages.extras import require

    require("ringspan.evaluate.RingLM", "lm_eval")
    from ringspan.evaluate.harness.lm import RingLM

    return RingLM
