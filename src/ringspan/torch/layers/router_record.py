"""Router scores of a mixture of E experts in one forward pass, also block by block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class RouterRecorder:
    """Collector of router scores (T, E); transformers' own sees blocks of tokens singly and without gradients."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._routers: set[nn.Module] = set()
        self._scores: list[Tensor] | None = None
        self._block: list[Tensor] | None = None

    def num_wanted(self, module: nn.Module) -> int:
        return 0 if self._scores is None else sum(part in self._routers for part in module.modules())

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        scores = self._scores = []
        try:
            yield scores
        finally:
            self._scores = None

    @contextmanager
    def block(self) -> Iterator[list[Tensor]]:
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
