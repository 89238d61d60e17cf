"""Layers of a decoder, counted while its code runs on the meta device. T tokens, C hidden size."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ringspan.core.geometry.layout import Layout
from ringspan.core.selection import Index
from ringspan.plan.model.indexes import index_of
from ringspan.plan.model.kinds import PARTS, Kept
from ringspan.plan.model.measured import WithIntegers, id_of
from ringspan.torch.engine.recurrence.current import SequencePass, passing
from ringspan.torch.mechanisms.chosen_keys.choice import (
    Choice,
    attend_to_chosen,
    choice_of,
)
from ringspan.torch.mechanisms.chosen_keys.modules import (
    choosing_modules,
    take_over_index,
)
from ringspan.torch.model.attention.own import own_attention, take_over_attention
from ringspan.torch.model.layers.family import ChosenKeys, family_of

# A prime that divides no size of a model, so that a number of elements it divides is per token.
_TOKENS: Final = 61
_ATTENTION: Final = "ringspan_counted"


class Heads(NamedTuple):
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0


_NO_HEADS: Final = Heads()


class _Saved(NamedTuple):
    child: str
    in_norm: bool
    is_input: bool
    dtype: torch.dtype
    numbers: int
    storage: weakref.ref[torch.UntypedStorage]

    @classmethod
    def of(cls, x: Tensor, child: str, *, in_norm: bool, is_input: bool) -> "_Saved":
        storage = x.untyped_storage()
        return cls(
            child,
            in_norm,
            is_input,
            x.dtype,
            storage.nbytes() // x.element_size(),
            weakref.ref(storage),
        )

    @property
    def column(self) -> int:
        """The index of the field of ``Kept`` that counts this tensor."""
        if self.dtype == torch.bfloat16:
            return 1 if self.in_norm else 0
        return 3 if self.in_norm else 4

    @property
    def size(self) -> int:
        """Numbers of a token, in bytes unless layers compute in their dtype."""
        return (
            self.numbers
            // _TOKENS
            * (1 if self.dtype == torch.bfloat16 else self.dtype.itemsize)
        )


@dataclass
class LayerRun:
    """One layer's run: attention, the modules that called it, linear layers; products and kept numbers by child."""

    heads: Heads = _NO_HEADS
    callers: list[nn.Module] = field(default_factory=list)
    linears: set[nn.Module] = field(default_factory=set)
    products: Counter[str] = field(default_factory=Counter)
    saved: list[_Saved] = field(default_factory=list)
    index: Index | None = None
    times: int = 0
    input: int = 0
    inputs: list[_Saved] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    shared: int = 0

    def settle(self, shared: set[int]) -> None:
        """Drop tensors that the result does not need and norms' inputs kept elsewhere; count the shared numbers."""
        self.saved = [each for each in self.saved if each.storage() is not None]
        known = {id(each.storage): each for each in self.saved if not each.in_norm}
        self.inputs = [
            each
            for each in self.inputs
            if known.setdefault(id(each.storage), each) is each
        ]
        self.shared = sum(
            each.size
            for each in self.saved
            if id(each.storage) in shared and not each.column
        )


class _Attention(torch.autograd.Function):
    """Attention that keeps q, k and v only; the rest that a ring keeps is counted by formula."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_choosing: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        batch, heads, tokens, _ = query.shape
        if is_choosing:
            return query.new_empty(batch, heads, tokens, value.shape[-1])
        return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: object) -> object:
        raise NotImplementedError


class _Counted(NamedTuple):
    """Attention to latents on one rank (``ringspan.torch.mechanisms.chosen_keys.choice.Asked``)."""

    module: nn.Module
    family: ChosenKeys
    layer: LayerRun
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]

    def attend(
        self, q: Tensor, latents: Tensor, choice: Choice, values: slice
    ) -> Tensor:
        self.layer.index = index_of(self.module, self.family, choice, latents.shape[-1])
        if not choice.chosen:
            choice.chosen = [q.new_empty(len(q), q.shape[2], self.layer.index.topk, 1)]
        return self.compute(q, latents[:, None], latents[:, None, :, values])


def _attend_to_choice(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    choice: Choice,
    counted: _Counted,
) -> Tensor:
    if hasattr(module, "expand_kv"):
        return attend_to_chosen(module, *qkv[:2], choice, counted)
    counted.layer.index = index_of(
        module, counted.family, choice, sum(x.shape[1] * x.shape[-1] for x in qkv[1:])
    )
    return counted.compute(*qkv).transpose(1, 2)


def first_alike(layers: list[nn.Module], others: Iterable[Any]) -> list[int]:
    """Return, for each layer, the first layer with the same modules, sizes, settings and ``others``."""
    first: dict[Any, int] = {}
    return [
        first.setdefault((other, *map(_looks_of, layer.named_modules())), number)
        for number, (layer, other) in enumerate(zip(layers, others, strict=True))
    ]


def _looks_of(named: tuple[str, nn.Module]) -> object:
    """Return a module's path, class, settings and weight shapes: equal ones cost the same.

    Whole numbers that say which layer it is are left out.
    """
    path, module = named
    settings = [
        (n, x)
        for n, x in vars(module).items()
        if isinstance(x, (bool, int, float, str, type(None)))
    ]
    numbers = {
        n for n, x in settings if type(x) is int and ("idx" in n or "layer" in n)
    }
    weights = [(n, x.shape) for n, x in module.named_parameters(recurse=False)]
    return (
        path,
        type(module),
        frozenset(row for row in settings if row[0] not in numbers),
        frozenset(weights),
    )


class _Watch:
    """State of a watched run: the layer and child at work, and the storages counted already."""

    def __init__(self, model: nn.Module) -> None:
        """Start outside of all layers.

        ``known``: storages that are not counted (weights, what is counted already). ``shared``: what layers are given
        besides hidden states; ``copies``: their copies in a layer's dtype. ``inputs``: what the running child was
        given.
        """
        self.layer = self.outside = LayerRun()
        self.child, self.norms, self.counted = "", 0, 0
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.ignore(*model.parameters(), *model.buffers())
        self.shared: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.copies: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.inputs: set[int] = set()
        grouped = {torch.ops.aten._grouped_mm: _grouped, _FALLBACK: _grouped}
        self.counter = FlopCounterMode(display=False, custom_mapping=grouped)

    def ignore(self, *tensors: Tensor) -> None:
        self.known |= _storages(tensors)

    def share(self, *tensors: Tensor) -> None:
        self.shared |= _storages(tensors)

    def copy(self, x: Tensor) -> Tensor:
        copied = x.to(torch.bfloat16)
        self.copies |= _storages([copied])
        return copied

    def switch(self, child: str, layer: LayerRun | None = None) -> None:
        """Add the FLOPs since the last switch to the child before; from now on ``child`` runs."""
        total = self.counter.get_total_flops()
        self.layer.products[self.child] += total - self.counted
        self.layer, self.child, self.counted = layer or self.layer, child, total

    def note(self, x: Tensor) -> Tensor:
        if not _holds(self.known, x):
            run = self.outside if _holds(self.shared, x) else self.layer
            in_norm, is_input = self.norms > 0, id_of(x) in self.inputs
            run.saved.append(
                _Saved.of(x, self.child, in_norm=in_norm, is_input=is_input)
            )
            self.ignore(x)
        return x


def _storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Return weak references to storages by their id; an id may be reused once its storage is gone."""
    return {id_of(x): weakref.ref(x.untyped_storage()) for x in tensors}


def _holds(storages: dict[int, Any], x: Tensor) -> bool:
    found = storages.get(id_of(x))
    return found is not None and found() is not None


def _grouped(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[-1]


_FALLBACK: Final = getattr(
    getattr(torch.ops, "transformers", None),
    "grouped_mm_fallback",
    torch.ops.aten._grouped_mm,
)


def run_layers(
    model: nn.Module,
    decoder: PreTrainedModel,
    layers: list[nn.Module],
    first: list[int],
) -> tuple[list[LayerRun], LayerRun]:
    """Run a model on the meta device and watch its layers (equal ones share a run), and the rest around them."""
    take_over_index(decoder, choosing_modules(decoder))
    try:
        return _run(
            model,
            decoder,
            layers,
            first,
            torch.ones(1, _TOKENS, dtype=torch.int64, device="meta"),
        )
    # Code that asks for tokens' positions needs values, which the meta device lacks.
    except (
        RuntimeError,
        NotImplementedError,
    ):
        with WithIntegers():
            return _run(
                model,
                decoder,
                layers,
                first,
                torch.ones(1, _TOKENS, dtype=torch.int64, device="cpu"),
            )


def _run(
    model: nn.Module,
    decoder: PreTrainedModel,
    layers: list[nn.Module],
    first: list[int],
    tokens: Tensor,
) -> tuple[list[LayerRun], LayerRun]:
    """Run a decoder once with counting attention and hooks; return each layer's run and the run of the rest.

    Attention is registered under a name of its own, so that it runs without a kernel and notes its sizes. Kept tensors
    are noted by hooks for saved tensors, products by PyTorch's FLOP counter.
    """
    watch, runs = _Watch(model), [LayerRun() for _ in layers]
    family = family_of(decoder.config)
    index = family.index or ChosenKeys()

    def compute(
        query: Tensor, key: Tensor, value: Tensor, *, is_choosing: bool = True
    ) -> Tensor:
        heads = Heads(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        watch.layer.heads = max(watch.layer.heads, heads)
        out = _Attention.apply(query, key, value, is_choosing)
        watch.ignore(out)
        return out

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object = None,
        *_: object,
        **given: Any,
    ) -> tuple[Tensor, None]:
        watch.layer.callers.append(module)
        choice = choice_of(given, mask)
        if choice is None:
            return compute(query, key, value, is_choosing=False).transpose(1, 2), None
        return _attend_to_choice(
            module,
            (query, key, value),
            choice,
            _Counted(module, index, watch.layer, compute),
        ), None

    AttentionInterface.register(_ATTENTION, attend)
    if choosing_modules(decoder):
        AttentionMaskInterface.register(
            _ATTENTION, lambda **_: torch.zeros(1, 1, 1, 0, dtype=torch.bool)
        )
    if family.takes_mask:
        AttentionMaskInterface.register(_ATTENTION, lambda **_: torch.zeros(()))
    if decoder.config._attn_implementation == _ATTENTION:
        pass  # set by an earlier run
    elif own := own_attention(decoder):
        decoder.config._attn_implementation = _ATTENTION
        take_over_attention(own, _ATTENTION)
    else:
        decoder.set_attn_implementation(_ATTENTION)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    sequence = SequencePass((Layout("contiguous", _TOKENS, 1),), None, is_part=True)
    kept = saved_tensors_hooks(watch.note, lambda x: x)
    with (
        _hooked(watch, runs, decoder, layers, first),
        passing(sequence),
        watch.counter,
        kept,
    ):
        out = decoder(input_ids=tokens, use_cache=False)
        watch.switch("")
        for run in (*runs, watch.outside):
            run.settle(
                {
                    id(storage)
                    for each in (watch.shared, watch.copies)
                    for storage in each.values()
                }
            )
        del out  # its graph kept alive, until now, what backward needs
    return [runs[number] for number in first], watch.outside


@contextmanager
def _hooked(
    watch: _Watch,
    runs: list[LayerRun],
    decoder: nn.Module,
    layers: list[nn.Module],
    first: list[int],
) -> Iterator[None]:
    """Tell the watch which layer, child, linear layer or norm of a decoder runs, by hooks that are removed at the end.

    A layer like an earlier one does not run: it returns copies of that one's output. Layers get copies of float32
    arguments in their own dtype, as from FSDP. Norms that can run in chunks of tokens note their input.
    """
    hooks = _Hooks(watch, runs)
    for number, layer in enumerate(layers):
        if first[number] < number:
            layer.forward = partial(hooks.again, first[number])
        else:
            hooks.on_layer(number, layer)
    inside = {module for layer in layers for module in layer.modules()}
    for path, module in decoder.named_modules():
        if is_norm(module) and module._parameters and module not in inside:
            hooks.on_child(watch.outside, path, module)
            hooks.on_norm(watch.outside, module)
    try:
        yield
    finally:
        hooks.remove()
        for layer in layers:
            layer.__dict__.pop("forward", None)


class _Hooks:
    """The hooks of ``_hooked``, and the outputs of layers that later ones return again."""

    def __init__(self, watch: _Watch, runs: list[LayerRun]) -> None:
        self._watch, self._runs = watch, runs
        self._handles: list[Any] = []
        self._made: dict[int, Any] = {}

    def on_layer(self, number: int, layer: nn.Module) -> None:
        """Watch a layer, its children, and in all of it linear layers and norms that can run in chunks."""
        run = self._runs[number]
        self._on(
            layer, partial(self._begin_layer, run), partial(self._end_layer, number)
        )
        self._handles.append(
            layer.register_forward_pre_hook(self._cast, with_kwargs=True)
        )
        for name, child in layer.named_children():
            self.on_child(run, name, child)
        for module in layer.modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                self._on(module, None, lambda _, module=module: run.linears.add(module))
            # ``blockwise.norm`` runs these in chunks of tokens.
            if (
                is_norm(module)
                and not isinstance(module, nn.LayerNorm)
                and module._parameters
            ):
                self.on_norm(run, module)

    def on_child(self, run: LayerRun, name: str, child: nn.Module) -> None:
        self._on(
            child,
            partial(self._begin_child, run, name),
            lambda _: self._watch.switch(""),
        )

    def on_norm(self, run: LayerRun, norm: nn.Module) -> None:
        self._on(norm, partial(self._begin_norm, run), self._end_norm)

    def again(self, number: int, *_: object, **__: object) -> object:
        """Return copies of a layer's output, in the place of a layer like it."""
        return tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, self._made[number]
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on(
        self,
        module: nn.Module,
        begin: Callable[[list[Tensor]], Any] | None,
        end: Callable[[Any], Any],
    ) -> None:
        if begin is not None:
            self._handles.append(
                module.register_forward_pre_hook(
                    lambda _, *given: begin(_tensors(given)), with_kwargs=True
                )
            )
        self._handles.append(module.register_forward_hook(lambda _, __, out: end(out)))

    def _begin_layer(self, run: LayerRun, given: list[Tensor]) -> None:
        run.times, run.input = run.times + 1, given[0].numel() // _TOKENS
        self._watch.share(*given[1:])
        self._watch.switch("", run)

    def _cast(self, _: nn.Module, *given: Any) -> Any:
        """Give a layer copies of its own in its dtype, as FSDP does."""
        return tree_map(
            lambda x: (
                self._watch.copy(x)
                if isinstance(x, Tensor) and x.dtype == torch.float32
                else x
            ),
            given,
        )

    def _end_layer(self, number: int, out: object) -> None:
        run = self._runs[number]
        if run.index and any(isinstance(each, Choice) for each in tree_leaves(out)):
            run.index = replace(run.index, is_passed=True)
        self._watch.switch("", self._watch.outside)
        self._made[number] = out

    def _begin_child(self, run: LayerRun, name: str, given: list[Tensor]) -> None:
        self._watch.switch(name)
        run.order.append(name)
        self._watch.inputs = {id_of(x) for x in given}

    def _begin_norm(self, run: LayerRun, given: list[Tensor]) -> None:
        self._watch.norms += 1
        run.inputs.append(
            _Saved.of(given[0], self._watch.child, in_norm=True, is_input=False)
        )

    def _end_norm(self, _: object) -> None:
        self._watch.norms -= 1


def _tensors(given: object) -> list[Tensor]:
    leaves = tree_leaves(given)
    inside = [
        x
        for each in leaves
        if isinstance(each, Mapping)
        for x in _tensors([*each.values()])
    ]
    return [x for x in leaves if isinstance(x, Tensor)] + inside


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def kept_of(run: LayerRun, layer: nn.Module, mixers: set[str]) -> tuple[Kept, ...]:
    """Return what a layer keeps per token by ``kinds.PARTS``; ``mixers``: its children with attention or a state."""
    last = max((at for at, name in enumerate(run.order) if name in mixers), default=-1)
    early = {
        name for name in run.order[: last + 1] if name not in run.order[last + 1 :]
    }

    def part_of(child: str, *, is_input: bool) -> int:
        norms = is_norm(layer.get_submodule(child)) if child else False
        is_early = child in early or (not child and last < 0)
        return (
            (0 if is_early else 2)
            if norms or (is_input and (child in mixers or not is_early))
            else 1
            if is_early
            else 3
        )

    sums = [[0] * len(Kept._fields) for _ in PARTS]
    for each in run.inputs:
        sums[part_of(each.child, is_input=False)][2] += each.numbers // _TOKENS
    for each in run.saved:
        if each.numbers % _TOKENS == 0:
            sums[part_of(each.child, is_input=each.is_input)][each.column] += each.size
    return tuple(Kept(*row) for row in sums)


def kept_around(run: LayerRun, layers: list[LayerRun]) -> tuple[Kept, Kept]:
    """Return what is kept per token around the layers, except tokens and positions, and by the last norm."""
    last = run.order[-1] if run.order else None
    sums = [[0] * len(Kept._fields) for _ in range(2)]
    theirs = {id(each.storage) for layer in layers for each in layer.inputs}
    for each in run.inputs:
        sums[each.child == last][2] += each.numbers // _TOKENS
    for each in run.saved:
        if each.numbers % _TOKENS == 0 and each.dtype.is_floating_point:
            sums[each.child == last][each.column] += each.size
            sums[0][2] -= each.size if id(each.storage) in theirs else 0
    return Kept(*sums[0]), Kept(*sums[1])


def products_of(run: LayerRun, children: set[str], *, inside: bool) -> int:
    """Return the weights that a token is multiplied with in some children, or in all others."""
    return sum(
        flops for name, flops in run.products.items() if (name in children) == inside
    ) // (2 * _TOKENS)
