"""Living tensors by purpose: bytes per category at each operator of a step, real or traced."""

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ringspan.core.names import CATEGORIES, Category
from ringspan.measure.trace.torch_seams import watched_predictions, watched_resizes
from ringspan.torch.engine.attention import latents
from ringspan.torch.engine.attention import op as attention
from ringspan.torch.model.layers.decoder import layers_of
from ringspan.torch.model.layers.modules import local_part

COMMUNICATION: Final = frozenset({"c10d", "_c10d_functional", "fsdp"})
_ops = torch.ops


@dataclass(frozen=True)
class Moment:
    """State after an operator: its number, phase, bytes per category, and the host's time."""

    index: int
    phase: str
    bytes: dict[str, int]
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


@dataclass
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    category: Category
    birth: int


@dataclass
class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts all storages created under it, also by the ring operator.

    It runs the ring's own loop in place of the operator; what a kernel allocates inside one of PyTorch's operators is
    not seen. With ``is_fake`` it answers for tensors without values (see ``_ANSWERS``).
    """

    is_fake: bool = False
    moments: list[Moment] = field(default_factory=list)
    phase: str = "forward"

    def __post_init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._seams: list[ExitStack] = []
        self._predicts = False
        self._totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._operators = 0
        self._changed = False
        self._sharded: list[Tensor] = []

    def __hash__(self) -> int:
        return id(self)

    def __enter__(self) -> "MemoryTracker":
        """Watch storages change their size, and DTensor make tensors that take no memory."""
        seams = ExitStack()
        seams.enter_context(watched_resizes(self._resized))
        seams.enter_context(watched_predictions(partial(setattr, self, "_predicts")))
        self._seams.append(seams)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._seams.pop().close()
        super().__exit__(*error)

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    def watch(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Count these tensors from now on, as this category."""
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            # Count storages, as views and detached tensors share their memory with another tensor.
            if storage._cdata in self._storages:
                self._move(self._storages[storage._cdata], category)
            else:
                self._add(storage, category)
        self._note()

    def watch_model(self, model: nn.Module) -> None:
        """Count a model's parameters and gradients, and watch the ends of its layers."""
        self._sharded = list(model.parameters())
        self.watch("parameters", self._sharded)
        self.watch("parameters", model.buffers())
        for layer in layers_of(model).values():
            births: list[int] = []
            layer.register_forward_pre_hook(
                lambda *_, births=births: births.append(self._operators)
            )
            layer.register_forward_hook(
                lambda *_, births=births: self._keep_since(births.pop())
            )

    def claim_gradients(self) -> None:
        """Count temporaries that have become a parameter's gradient as gradients."""
        for parameter in self._sharded:
            if parameter.grad is not None:
                known = self._storages.get(
                    local_part(parameter.grad).untyped_storage()._cdata
                )
                if known is not None:
                    self._move(known, "gradients")

    def keep(self) -> None:
        """Count temporaries that forward leaves for backward as activations."""
        self._keep_since(0)
        self._note()

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        states = (
            value for state in optimizer.state.values() for value in state.values()
        )
        self.watch(
            "optimizer", (value for value in states if isinstance(value, Tensor))
        )

    def communicate(self, message: Tensor) -> None:
        """Count a message that no operator sends as communication, unless it is kept for something else."""
        known = self._storages.get(message.untyped_storage()._cdata)
        if known is not None and known.category == "temporaries":
            self._move(known, "communication")
        self._note()

    def restart(self) -> None:
        """Forget the moments so far, but not the storages that are held."""
        # FSDP pads uneven parameters to new tensors in the first step.
        self.watch("parameters", self._sharded)
        self.moments.clear()
        self._note(always=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled under the tracker, and a guard against it costs more than a query of a tensor.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operator and count its storages, unless it needs no counting.

        Not counted: predictions of shapes, and queries of a tensor's device, which are more than half of a traced
        step's calls. In a fake run, values have fixed answers. The ring's own operators are counted inside their loops.
        """
        kwargs = kwargs or {}
        if func is _DEVICE_OF:
            return (
                args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
            )
        if DTensor in types:
            return NotImplemented  # DTensor calls again with its local tensors
        if self.is_fake and func in _ANSWERS:
            return _ANSWERS[func]
        if self._predicts:
            return func(*args, **kwargs)
        if func.namespace == "ringspan" and func in _LOOPS:
            with self:
                return _LOOPS[func](*args, **kwargs)
        return self._counted(func, args, kwargs)

    def _counted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> object:
        """Run an operator, and count the storages that it creates or sends.

        New storages are temporaries, or communication if the operator communicates. A temporary that is sent becomes
        communication, and before a reduction finished gradients are claimed.
        """
        communicates = func.namespace in COMMUNICATION
        # The results of the previous reduction have become a layer's gradients by now.
        if communicates and func.name().startswith(_REDUCE_SCATTERS):
            self.claim_gradients()
        result = func(*args, **kwargs)
        self._operators += 1
        given = set[int]()
        for tensor in tensors_of((args, kwargs)):
            storage = tensor.untyped_storage()
            given.add(storage._cdata)
            known = self._storages.get(storage._cdata)
            if communicates and known is not None and known.category == "temporaries":
                self._move(
                    known, "gradients" if func in _TAKES_GRADIENTS else "communication"
                )
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            # In-place operators and views return storages that are known, or do not belong to the step.
            if storage._cdata not in given and storage._cdata not in self._storages:
                self._add(storage, "communication" if communicates else "temporaries")
        self._note()
        return result

    def _add(self, storage: torch.UntypedStorage, category: Category) -> None:
        cdata = storage._cdata
        reference = weakref.ref(storage, lambda _: self._drop(cdata))
        self._storages[cdata] = _Storage(
            reference, storage.nbytes(), category, self._operators
        )
        self._count(category, storage.nbytes())

    def _drop(self, cdata: int) -> None:
        known = self._storages.pop(cdata, None)
        if known is not None:
            self._count(known.category, -known.num_bytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None and storage.nbytes() != known.num_bytes:
            # Only FSDP resizes storages, to gather parameters.
            self._move(known, "communication")
            self._count(known.category, storage.nbytes() - known.num_bytes)
            known.num_bytes = storage.nbytes()

    def _move(self, known: _Storage, category: Category) -> None:
        if known.category != category:
            self._count(known.category, -known.num_bytes)
            self._count(category, known.num_bytes)
            known.category = category

    def _keep_since(self, birth: int) -> None:
        for known in self._storages.values():
            if known.category == "temporaries" and known.birth >= birth:
                self._move(known, "activations")

    def _count(self, category: Category, num_bytes: int) -> None:
        self._totals[category] += num_bytes
        self._changed = self._changed or num_bytes != 0

    def _note(self, *, always: bool = False) -> None:
        if self._changed or always:
            self.moments.append(
                Moment(
                    self._operators, self.phase, dict(self._totals), time.perf_counter()
                )
            )
            self._changed = False


def train_step(
    tracker: MemoryTracker,
    model: nn.Module,
    optimizer: Optimizer,
    batch: dict[str, Tensor],
) -> None:
    """Run a training step like the loop, its phases marked in the tracker."""
    tracker.phase = "forward"
    loss = model(**batch).loss
    tracker.keep()
    tracker.phase = "backward"
    loss.backward()
    tracker.claim_gradients()
    tracker.phase = "optimizer"
    end_step(tracker, model, optimizer)


def end_step(tracker: MemoryTracker, model: nn.Module, optimizer: Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    tracker.watch_optimizer(optimizer)
    optimizer.zero_grad()


def held_activations(model: PreTrainedModel, batch: dict[str, Tensor]) -> int:
    """Return the bytes that the decoder keeps for backward, without parameters gathered by FSDP."""
    tracker = MemoryTracker()
    # Measure between decoder and loss, as the loss allocates gradients of its own.
    handle = model.base_model.register_forward_hook(lambda *_: tracker.keep())
    with tracker:
        tracker.watch("parameters", [*model.parameters(), *model.buffers()])
        loss = model(**batch).loss
    handle.remove()
    held = next(
        (
            each.bytes["activations"]
            for each in tracker.moments
            if each.bytes["activations"]
        ),
        0,
    )
    loss.backward()
    model.zero_grad()
    return held


# The functions that torch registered as the kernels of the ring's operators.
_LOOPS: Final[dict[Any, Callable[..., Any]]] = {
    _ops.ringspan.ring_attention.default: attention._forward,
    _ops.ringspan.ring_attention_backward.default: attention._backward,
    _ops.ringspan.latent_attention.default: latents._forward,
    _ops.ringspan.latent_attention_backward.default: latents._backward,
}
# Answers to questions about values, which a traced run lacks: counts agree, positions are right.
_ANSWERS: Final[dict[Any, Any]] = {
    _ops.aten._local_scalar_dense.default: 1,
    _ops.aten.equal.default: True,
}
# These copy gradients into the buffer to be reduced; torch 2.15 replaced the first by the second.
_TAKES_GRADIENTS: Final = {
    getattr(_ops.fsdp, name).default
    for name in ("chunk_cat", "chunk_cat_mixed_dtype")
    if hasattr(_ops.fsdp, name)
}
_REDUCE_SCATTERS: Final = ("c10d::reduce_scatter", "c10d::_reduce_scatter")
_DEVICE_OF: Final = _ops.prim.device.default


def tensors_of(tree: object) -> Iterator[Tensor]:
    """Yield the tensors with storage of their own in an operator's arguments or results."""
    if isinstance(tree, Tensor):
        if type(tree) is not DTensor:
            yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors_of(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors_of(part)
