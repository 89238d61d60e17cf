"""Router scores of a mixture of experts in one forward pass, also block by block. T local tokens, E experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class RouterRecorder:
    """Collector of router scores (T, E) through forward hooks, active inside ``recording``.

    Transformers' own capture sees a blockwise router once per block and without gradients. Here blockwise code takes
    each block's scores (``block``) and adds all tokens' scores.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._routers: set[nn.Module] = set()
        self._scores: list[Tensor] | None = None
        self._block: list[Tensor] | None = None

    def num_wanted(self, module: nn.Module) -> int:
        """Return the number of routers in a module whose scores are wanted now."""
        return 0 if self._scores is None else sum(part in self._routers for part in module.modules())

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yield a list that receives each layer's scores (T, E) during a forward pass."""
        scores = self._scores = []
        try:
            yield scores
        finally:
            self._scores = None

    @contextmanager
    def block(self) -> Iterator[list[Tensor]]:
        """Yield a list that receives the scores of one block of tokens instead."""
        before, self._block = self._block, []
        try:
            yield self._block
        finally:
            self._block = before

    def add(self, scores: Tensor) -> None:
        target = self._scores if self._block is None else self._block
        if target is not None:
            target.append(scores)

    def attach(self, router: nn.Module, index: int) -> None:
        """Record the output of a module, or its output number ``index``."""

        def record(_: nn.Module, args: object, output: Any) -> None:
            scores = output[index] if isinstance(output, tuple) else output
            if scores is not None:
                self.add(scores)

        self._routers.add(router)
        router.register_forward_hook(record)
