"""Routers' scores of one forward pass of a mixture of experts, also of routers that see a block of tokens at a time.

T local tokens, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class RouterRecorder:
    """Collects scores (T, E) through hooks on routers, while ``recording``.

    Transformers' own capture sees a router that runs in blocks of tokens once for each block and without gradients;
    here whoever computes in blocks takes their scores out (``block``), and adds those of all tokens.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._routers: set[nn.Module] = set()
        self._scores: list[Tensor] | None = None
        self._block: list[Tensor] | None = None

    def num_wanted(self, module: nn.Module) -> int:
        """Of how many routers in a module the scores are wanted now."""
        return 0 if self._scores is None else sum(part in self._routers for part in module.modules())

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """A forward pass whose scores (T, E) of each layer are put into the list."""
        scores = self._scores = []
        try:
            yield scores
        finally:
            self._scores = None

    @contextmanager
    def block(self) -> Iterator[list[Tensor]]:
        """Tokens of which a module computes a block at a time: its scores are put into this list instead."""
        before, self._block = self._block, []
        try:
            yield self._block
        finally:
            self._block = before

    def add(self, scores: Tensor) -> None:
        """Scores of all tokens, or of a block of them."""
        target = self._scores if self._block is None else self._block
        if target is not None:
            target.append(scores)

    def attach(self, router: nn.Module, index: int) -> None:
        """Record what a module returns, or its result number ``index``."""

        def record(_: nn.Module, args: Any, output: Any) -> None:
            scores = output[index] if isinstance(output, tuple) else output
            if scores is not None:
                self.add(scores)

        self._routers.add(router)
        router.register_forward_hook(record)
