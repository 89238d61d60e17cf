"""Segments of decoder layers that keep one input (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

When backward reaches a segment's last layer, the other inputs are recomputed without autograd, each freed after its
layer: at most ``L / k + k - 1`` inputs instead of ``L``, for one more forward pass of all but every k-th layer, without
the ring if its results are kept.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.attention.handler import Results, handling, name_of
from ringspan.torch.model.layers.modules import hidden_of
from ringspan.torch.model.memory.offload import Store
from ringspan.torch.model.memory.sharding import is_whole
from ringspan.torch.runtime.autocast import autocast_now


class Segments:
    """Checkpointing in segments of ``size`` layers; ``store`` holds their inputs until backward."""

    def __init__(self, size: int, store: Store, *, keeps_attention: bool) -> None:
        self._size, self._store, self._keeps_attention = size, store, keeps_attention
        self._segment: _Segment | None = None
        self._last: StorageWeakRef | None = None  # what the layer before returned

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Begin a segment at the first layer of a decoder's forward pass."""
        try:
            # A store that moves nothing would still be asked about each tensor that autograd saves.
            with self._store.hooks() if self._store.moves else nullcontext():
                yield
        finally:
            self._segment = self._last = None

    def checkpoint(
        self, layer: nn.Module, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Checkpoint ``function(*args)``; UnsupportedError unless it begins a segment or continues the last."""
        # Evaluation keeps nothing, so there is nothing to save.
        if not torch.is_grad_enabled():
            return function(*args)
        kept: list[tuple[Any, ...]] = []
        options: dict[str, Any] = {"use_reentrant": False}
        if self._keeps_attention:
            options["context_fn"] = lambda: (
                _keeping(self._store, kept),
                _replaying(self._store, kept),
            )
        if self._size == 1:
            return checkpointed(function, *args, **options)
        segment = self._segment
        begins = segment is None or len(segment.calls) == self._size
        if not args or not (
            begins or StorageWeakRef(args[0].untyped_storage()) == self._last
        ):
            raise UnsupportedError(
                f"layers_per_checkpoint={self._size}: a {type(layer).__name__} does not take, first, what the layer "
                "before it returned, so that its input cannot be made again from that layer's; use "
                "layers_per_checkpoint=1"
            )
        if segment is None or begins:
            segment = self._segment = _Segment(self._store)
        place = len(segment.calls)
        # Random numbers and autocast are noted, since recomputing an input has to draw the same numbers.
        segment.calls.append(
            _Call(layer, function, args[1:], surroundings(args[0]), self._store, kept)
        )
        with segment.hooks(place, args[0]):
            result = checkpointed(function, *args, **options)
        # A strong reference would keep the very tensor that segments exist to free.
        self._last = StorageWeakRef(hidden_of(result).untyped_storage())
        return result


# A compiled program supports only checkpoints with other contexts.
@torch.compiler.disable(recursive=False)
def checkpointed(function: Callable[..., Any], *args: object, **options: Any) -> Any:
    """Run ``torch.utils.checkpoint``, and remove its hooks if ``function`` raises."""
    # Until torch 2.12 the hooks live as long as the exception, and later passes would recompute from the failed layer.
    try:
        return checkpoint(function, *args, **options)
    except BaseException as error:
        for frame, _ in walk_tb(error.__traceback__):
            generator = frame.f_locals.get("gen")
            if frame.f_globals.get(
                "__name__"
            ) == "torch.utils.checkpoint" and isinstance(generator, Generator):
                generator.close()
        raise


@dataclass(frozen=True)
class _Call:
    layer: nn.Module
    function: Callable[..., Any]
    others: tuple[Any, ...]  # its arguments but the input
    surroundings: Callable[[], Any]
    store: Store
    # Results of the ring, each after the name of the function that computed them.
    kept: list[tuple[Any, ...]]

    def again(self, hidden: Tensor) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.surroundings())
            # The ring does not run again, since its results are kept; every rank would have to run it at once.
            if self.kept:
                stack.enter_context(_replaying(self.store, list(self.kept), again=True))
            return hidden_of(self.function(hidden, *self.others))


class _Segment:
    def __init__(self, store: Store) -> None:
        self.calls: list[_Call] = []
        self._store = store
        self._first: Any = None  # the first layer's input, or where it waits
        self._made: dict[int, Tensor] = {}

    def hooks(self, place: int, hidden: Tensor) -> saved_tensors_hooks:
        """Save the segment in autograd instead of inputs after the first."""
        # Not ``hidden`` itself, which would live as long as the saved tensors.
        form = (
            hidden.shape,
            hidden.dtype,
        )
        # Checkpointing saves the layer's arguments, and ``hidden`` is the first of them.
        is_input = iter((True,))

        def pack(x: Tensor) -> object:
            if (x.shape, x.dtype) != form or not next(is_input, False):
                return self._store.put(x)
            if place:
                return partial(self._input, place)
            self._first = self._store.put(x)
            return self._first

        def unpack(kept: Any) -> Tensor:
            return kept() if isinstance(kept, partial) else self._store.get(kept)

        return saved_tensors_hooks(pack, unpack)

    def _input(self, place: int) -> Tensor:
        if place not in self._made:
            hidden = self._store.get(self._first, again=True)
            # Backward needs the last layer's input first; the inputs computed on the way wait in ``_made``.
            for number, call in enumerate(self.calls[:place]):
                coming = self.calls[number + 1].layer if number + 1 < place else None
                with _gathered(call.layer, coming, stays=number + 1 == place):
                    hidden = self._made[number + 1] = call.again(hidden)
        return self._made.pop(place)


@contextmanager
def _gathered(
    layer: nn.Module, coming: nn.Module | None, *, stays: bool
) -> Iterator[None]:
    """Gather a layer's parameters while active, prefetch the next one's; keep them if it ``stays``."""
    if isinstance(layer, FSDPModule):
        # If a layer's input has no gradient, FSDP leaves the layer whole after backward and does not gather it again.
        stays |= is_whole(layer)
        layer.unshard()
        # The next layer is gathered while this one computes, as in an ordinary forward pass of FSDP.
        if isinstance(coming, FSDPModule):
            coming.unshard(async_op=True)
    yield
    if isinstance(layer, FSDPModule) and not stays:
        layer.reshard()


def surroundings(hidden: Tensor) -> Callable[[], Any]:
    """Return a factory of contexts with the present random state and autocast, for the device of a tensor."""
    kind = hidden.device.type
    cpu_state = torch.get_rng_state()
    devices, states = get_device_states(hidden)
    autocast = autocast_now(kind)

    @contextmanager
    def as_then() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind), autocast():
            torch.set_rng_state(cpu_state)
            set_device_states(devices, states, device_type=kind)
            yield

    return as_then


def _keeping(store: Store, kept: list[tuple[Any, ...]]) -> AbstractContextManager[None]:
    def keep(compute: Callable[[], Results]) -> Results:
        result = compute()
        kept.append((name_of(compute), *(store.put(x.detach()) for x in result)))
        return result

    return handling(keep)


def _replaying(
    store: Store, kept: list[tuple[Any, ...]], *, again: bool = False
) -> AbstractContextManager[None]:
    def replay(compute: Callable[[], Results]) -> Results:
        if not kept:
            raise RuntimeError(
                "checkpointed layers can be differentiated once; compute the loss again"
            )
        name, *results = kept.pop(0)
        # An operator that got the results of another one would read foreign memory.
        if name != name_of(compute):
            raise RuntimeError(
                f"a layer that is computed again asks for {name_of(compute)}, where its pass had {name}"
            )
        return tuple(store.get(x, again=again) for x in results)

    return handling(replay)
