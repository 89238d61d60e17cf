"""Experts of a layer gathered in slices: each holds some experts, and is a unit of FSDP of its own.

    out[t] = sum over slices s of sum over slots j with chosen[t, j] in s of weight[t, j] * expert(chosen[t, j], x[t])

One slice computes while the next one is gathered, so W/n of a layer's W numbers are whole, W/n on their way, and in
backward W/n gradients: 3W/n in place of 3W. Backward gathers each slice once more, computes it again and sums its
gradients over the ranks before the one below it, so no slice is gathered more often than a whole layer would be. Each
slice computes the rows (token, slot) that chose its experts, and no others.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.core.errors import UnsupportedError
from ringspan.core.expert_slices import check_slices, num_slices, slice_bounds
from ringspan.core.names import ExpertSlices
from ringspan.torch.model.layers.blockwise.blocks import accumulate
from ringspan.torch.model.layers.modules import (
    Mixin,
    local_part,
    mix_in,
    refusing,
)
from ringspan.torch.model.layers.switches import Switches
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.memory.resting import gradient_dtype, groups_in
from ringspan.torch.model.weights.loading import rows_of
from ringspan.torch.model.weights.packed import has_rows, is_packed, plain_parts
from ringspan.torch.model.weights.shards import SLICES
from ringspan.torch.runtime.autocast import autocast_now

_NUM_INPUTS: Final = 3  # hidden states, chosen experts, their weights
_CHANGED: Final = (
    "{model} adapts experts that are gathered in slices, which are not changed; merge before parallelize, or let "
    "rs.named_weights merge into copies"
)


class FusedExperts(NamedTuple):
    """A layer's experts whose weights are stacked in tensors (E, ...)."""

    path: str  # in the model
    module: nn.Module
    num_experts: int
    num_zero: int  # experts without weights, chosen by higher numbers
    wrappers: tuple[
        Any, ...
    ]  # PEFT's, which adapt its parameters; the inner ones first

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.module.parameters(recurse=False)]

    def gathered_bytes(self, compute_dtype: torch.dtype | None) -> int:
        """Return the gathered bytes of all experts: packed weights as they are, others in ``compute_dtype``."""
        return sum(
            sum(part.nbytes for _, part in plain_parts("", p))
            if is_packed(p)
            else p.numel() * (compute_dtype or p.dtype).itemsize
            for p in self.parameters
        )


def find_experts(view: ModelView) -> list[FusedExperts]:
    """Return the experts of the decoder's layers that slices can hold."""
    paths = {module: path for path, module in view.model.named_modules()}
    found: dict[nn.Module, FusedExperts] = {}
    for layer in view.layers.values():
        wrappers: dict[nn.Module, tuple[Any, ...]] = {}
        for module in layer.modules():
            if _adapts_parameter(module):
                base: Any = module.get_base_layer()  # pyright: ignore[reportCallIssue]
                wrappers[base] = (module, *wrappers.get(base, ()))
        for module in layer.modules():
            if (counts := _counts(module)) is not None:
                around = wrappers.get(module, ())
                found[module] = FusedExperts(paths[module], module, *counts, around)
    return [*found.values()]


def _adapts_parameter(module: nn.Module) -> bool:
    return hasattr(module, "parameter_name") and hasattr(module, "get_base_layer")


def _counts(module: nn.Module) -> tuple[int, int] | None:
    """Return the experts of a module and those without weights; None if slices cannot hold them.

    Its forward takes hidden states, chosen experts and their weights, and each of its tensors has a part per expert.
    """
    weights = [p for p in module._parameters.values() if p is not None]
    number: Any = getattr(module, "num_routed_experts", None)
    number = getattr(module, "num_experts", None) if number is None else number
    zero = int(getattr(module, "zero_expert_num", 0))
    if not isinstance(number, int) or sum(p.ndim == 3 for p in weights) < 2:
        return None
    has_more = any(True for _ in module.buffers()) or len(
        [*module.parameters()]
    ) != len(weights)
    sizes = (number, number + zero)
    if has_more or any(p.ndim < 2 or p.shape[0] not in sizes for p in weights):
        return None
    if len(inspect.signature(module.forward).parameters) != _NUM_INPUTS:
        return None
    return number, zero


def choose_slices(
    view: ModelView, wanted: ExpertSlices, compute_dtype: torch.dtype | None
) -> dict[FusedExperts, int]:
    """Return the experts that are gathered in slices, and in how many; UnsupportedError for what cannot be.

    ``auto`` takes the fewest whose bytes stay within ``MAX_SLICE_BYTES``, in layers that can be sliced.
    """
    check_slices(wanted)
    found = [] if wanted == 1 else find_experts(view)
    if wanted not in (1, "auto") and not found:
        raise UnsupportedError(
            f"expert_slices={wanted}: {view.name} has no layer whose experts are stacked in tensors and called with "
            "tokens, chosen experts and weights; use expert_slices=1"
        )
    chosen: dict[FusedExperts, int] = {}
    for each in found:
        size = each.gathered_bytes(compute_dtype)
        number = num_slices(wanted, each.num_experts, size)
        if number == 1:
            continue
        why = _why_not(each)
        if why and wanted != "auto":
            raise UnsupportedError(
                f"expert_slices={wanted}: {each.path} {why}; use expert_slices=1"
            )
        if not why:
            chosen[each] = number
    return chosen


def _why_not(experts: FusedExperts) -> str:
    """Return what of these experts a slice would not compute, or ""."""
    packed = [p for p in experts.parameters if is_packed(p)]
    if not all(map(has_rows, packed)):
        return "has weights that are packed across experts"
    if packed and experts.wrappers:
        return "has packed weights that an adapter changes"
    if "forward" in vars(experts.module):
        return "has a forward of its own"
    return ""


def slice_experts(
    chosen: Mapping[FusedExperts, int], chunk_tokens: int | str
) -> list[nn.Module]:
    """Cut experts into slices, in place; return the slices, units of FSDP.

    The module of experts keeps its place and hooks. Its parameters become parts of ``slices``, without a copy.
    """
    units: list[nn.Module] = []
    rows = FREE_CHUNK_TOKENS if chunk_tokens == "auto" else int(chunk_tokens)
    for experts, number in chosen.items():
        module: Any = experts.module
        bounds = slice_bounds(experts.num_experts, number)
        slices = [_slice_of(experts, first, last) for first, last in bounds]
        module._parameters.clear()
        mix_in(
            module,
            _Sliced,
            ring_starts=[first for first, _ in bounds],
            ring_num_experts=experts.num_experts,
            ring_end=experts.num_experts + experts.num_zero,
            ring_chunk_tokens=rows,
            ring_wrappers=experts.wrappers,
            ring_is_awake=None,
        )
        setattr(module, SLICES, nn.ModuleList(slices))
        module.register_load_state_dict_pre_hook(_take_whole_experts)
        for wrapper in experts.wrappers:
            mix_in(wrapper, _Passing)
        units += slices
    return units


def _slice_of(experts: FusedExperts, first: int, last: int) -> nn.Module:
    """Return a module like the experts' that holds those from ``first`` to ``last``; the last one, zero experts too."""
    part: Any = copy.copy(experts.module)
    zero = experts.num_zero if last == experts.num_experts else 0
    part._parameters, part._modules = {}, dict(experts.module._modules)
    # Hooks stay with the experts, which are called once.
    hooks = {
        n: x for n, x in vars(part).items() if "_hooks" in n and isinstance(x, dict)
    }
    vars(part).update({name: type(each)() for name, each in hooks.items()})
    for name, parameter in experts.module._parameters.items():
        if parameter is not None:
            end = last + (zero if len(parameter) > experts.num_experts else 0)
            part._parameters[name] = rows_of(parameter, first, end)
    counts = {
        "num_experts": last - first,
        "num_routed_experts": last - first,
        "total_experts": last - first + zero,
        "zero_expert_num": zero,
    }
    vars(part).update(
        {name: value for name, value in counts.items() if name in vars(part)}
    )
    if "total_experts" in vars(part):
        # These experts mistake one slot for none, so a second one chooses an expert that returns its input, times 0.
        part.ring_spare, part.total_experts = part.total_experts, part.total_experts + 1
    return part


def slice_placement(ranks: int) -> Any:
    """Return where FSDP cuts a slice's parameter: within experts if ``ranks`` divides their rows or columns.

    A slice may have fewer experts than there are ranks, and FSDP pads what it cuts along experts.
    """

    def place(parameter: nn.Parameter) -> Shard:
        sizes = local_part(parameter).shape
        return Shard(next((d for d in range(1, len(sizes)) if not sizes[d] % ranks), 0))

    return place


def _take_whole_experts(
    module: Any, state: dict[str, Any], prefix: str, *others: object
) -> None:
    """Let ``load_state_dict`` take tensors of all experts and cut them into slices."""
    for name in module.slices[0]._parameters:
        whole = state.get(prefix + name)
        if not isinstance(whole, Tensor) or isinstance(whole, DTensor):
            continue
        del state[prefix + name]
        for number, (_, rows) in enumerate(slices_of(module)):
            state[f"{prefix}{SLICES}.{number}.{name}"] = whole[rows]


def slices_of(module: Any) -> Iterator[tuple[nn.Module, slice]]:
    """Yield the slices of experts, each with its rows of their tensors; any other module once, with all rows."""
    if not isinstance(module, _Sliced):
        yield module, slice(None)
        return
    parts: Any = module.slices
    ends = [*module.ring_starts[1:], None]
    for part, first, end in zip(parts, module.ring_starts, ends, strict=True):
        yield part, slice(first, end)


class _Rows(NamedTuple):
    """Rows (token, slot) of a pass, sorted by their experts, and the ends of each slice's."""

    order: Tensor  # indices into tokens x slots
    experts: Tensor
    ends: list[int]
    num_weighted: int  # rows whose experts have weights
    slots: int

    @staticmethod
    @torch.no_grad()
    def of(chosen: Tensor, module: Any) -> "_Rows":
        """Sort the chosen experts (T, K). Their ends are all that the host waits for."""
        experts, order = chosen.reshape(-1).sort(stable=True)
        starts = [*module.ring_starts, module.ring_end, module.ring_num_experts]
        bounds = torch.tensor(starts, dtype=experts.dtype, device=experts.device)
        found = torch.searchsorted(experts, bounds)
        # Tensors of a dry run have no values: experts are chosen evenly there.
        *ends, with_weights = (
            [len(order) * start // module.ring_end for start in starts]
            if isinstance(found, FakeTensor)
            else found.tolist()
        )
        return _Rows(order, experts, ends, with_weights - ends[0], chosen.shape[-1])

    def blocks(self, number: int, tokens: int) -> Iterator[slice]:
        """Yield a slice's rows in blocks of what ``tokens`` choose, or in one if it is 0."""
        first, last = self.ends[number : number + 2]
        size = tokens * self.slots or max(1, last - first)
        for start in range(first, last, size):
            yield slice(start, min(last, start + size))


class _Sliced(Mixin):
    """Experts that are gathered slice by slice."""

    slices: nn.ModuleList
    ring_starts: list[int]  # first expert of each slice
    ring_num_experts: int  # those with weights
    ring_end: int  # all experts
    ring_chunk_tokens: int  # tokens whose rows are computed at once; 0 for all
    ring_wrappers: tuple[Any, ...]
    # Whether weights have gradients of their own, also of earlier passes; None before a backward pass.
    ring_is_awake: bool | None

    @torch.compiler.disable()
    def forward(
        self: Any, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor
    ) -> Tensor:
        chosen, weights = (*args, *kwargs.values())
        # The first slice is on its way while the host waits for the number of rows.
        _begin_to_gather(self.slices[0])
        rows = _Rows.of(chosen, self)
        # Experts may train while nothing before them does.
        anchor = hidden_states.new_empty(0, requires_grad=_is_trained(self))
        kept = _Recomputed.apply(
            self, rows, anchor, hidden_states, weights, *_factors_in(self)
        )
        return _Computed.apply(self, rows, *kept)


def _is_trained(experts: Any) -> bool:
    return any(p.requires_grad for p in experts.slices.parameters())


class _Recomputed(torch.autograd.Function):
    """Identity that computes the experts again in backward; the computation, ``_Computed``, follows it.

    A checkpointed layer's recomputation stops here, so each slice is gathered twice, not three times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        experts: Any,
        rows: _Rows,
        anchor: Tensor,
        hidden: Tensor,
        weights: Tensor,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weights)
        ctx.experts, ctx.rows = experts, rows
        ctx.autocast = autocast_now(hidden.device.type)
        outermost = (experts, *experts.ring_wrappers)[-1]
        ctx.as_then = Switches(outermost).noted()
        return hidden.view_as(hidden), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weights = ctx.saved_tensors
        with ctx.as_then():
            gradients = _Gradients(ctx.experts, ctx.rows, hidden, weights, d_out)
            for number, part in _gathered(ctx.experts):
                gradients.add(number, part, ctx.autocast)
        return None, None, None, *gradients.found()


class _Computed(torch.autograd.Function):
    """Computation of all slices that keeps nothing and passes its gradient on to ``_Recomputed``."""

    @staticmethod
    def forward(
        ctx: Any, experts: Any, rows: _Rows, hidden: Tensor, weights: Tensor
    ) -> Tensor:
        out = torch.zeros_like(hidden, dtype=_dtype_of_sums(hidden))
        for number, part in _gathered(experts):
            with _adapted(experts, part, number):
                for block in rows.blocks(number, experts.ring_chunk_tokens):
                    picked = rows.order[block]
                    tokens = picked // rows.slots
                    ids = rows.experts[block] - experts.ring_starts[number]
                    scales = weights.reshape(-1)[picked]
                    y = _compute(part, hidden[tokens], ids, scales)
                    out.index_add_(0, tokens, y.to(out.dtype))
            _leave(part)
        return out.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, d_out, None


class _Gradients:
    """Gradients of a layer's experts in one backward pass, slice by slice."""

    def __init__(
        self, experts: Any, rows: _Rows, hidden: Tensor, weights: Tensor, d_out: Tensor
    ) -> None:
        self._experts, self._rows = experts, rows
        self._hidden, self._weights, self._d_out = hidden, weights, d_out
        self._d_hidden = torch.zeros_like(hidden, dtype=_dtype_of_sums(hidden))
        self._d_weights = torch.zeros_like(weights).reshape(-1)
        # They are read now, not in forward, because FSDP has gathered the whole adapters again for backward.
        self._factors = _factors_in(experts)
        self._d_factors: list[Tensor | None] = [None] * len(self._factors)
        is_awake = experts.ring_is_awake
        if is_awake is None:
            is_awake = any(map(_has_gradient, _sharded_in(experts)))
        experts.ring_is_awake = is_awake or rows.num_weighted > 0

    def found(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states, of the weights of experts and of adapters."""
        return (
            self._d_hidden.to(self._hidden.dtype),
            self._d_weights.view(self._weights.shape),
            *(
                None if d is None else d.to(factor.dtype)
                for d, factor in zip(self._d_factors, self._factors, strict=True)
            ),
        )

    def add(self, number: int, part: Any, autocast: Callable[[], Any]) -> None:
        """Compute a slice again, with its gradients, and have FSDP sum its parameters' over the ranks."""
        held = dict(part._parameters)
        with _adapted(self._experts, part, number) as adapted:
            used = dict(part._parameters)
            wanted = [name for name, p in used.items() if p.requires_grad]
            leaves = [used[name] for name in wanted]
            sums: list[Tensor | None] = [None] * len(wanted)
            blocks = [*self._rows.blocks(number, self._experts.ring_chunk_tokens)]
            for block in blocks:
                parts = self._of_block(block, number, part, leaves, autocast)
                if len(blocks) == 1:
                    sums = parts
                else:
                    accumulate(sums, parts, self._d_out)
        totals = dict(zip(wanted, sums, strict=True))
        self._add_factors(adapted, totals)
        for name, parameter in held.items():
            if parameter.requires_grad:
                _add_gradient(parameter, totals[name])
        for group in groups_in(part):
            group.post_backward()

    def _of_block(
        self,
        block: slice,
        number: int,
        part: Any,
        leaves: list[Tensor],
        autocast: Callable[[], Any],
    ) -> list[Tensor | None]:
        """Add the gradients of some rows' inputs, and return the slice's parameters'."""
        rows = self._rows
        picked = rows.order[block]
        tokens = picked // rows.slots
        ids = rows.experts[block] - self._experts.ring_starts[number]
        with torch.enable_grad(), autocast():
            hidden = self._hidden[tokens].requires_grad_()
            scales = self._weights.reshape(-1)[picked].requires_grad_()
            y = _compute(part, hidden, ids, scales)
        d_y = self._d_out[tokens].to(y.dtype)
        found: list[Tensor | None] = list(
            torch.autograd.grad(y, [hidden, scales, *leaves], d_y, allow_unused=True)
        )
        d_hidden, d_scales, *parts = found
        if d_hidden is not None:
            self._d_hidden.index_add_(0, tokens, d_hidden.to(self._d_hidden.dtype))
        if d_scales is not None:
            self._d_weights[picked] = d_scales
        return parts

    def _add_factors(
        self, adapted: Sequence["_Delta"], totals: Mapping[str, Tensor | None]
    ) -> None:
        """Add the gradients of adapters, from the gradients of the weights that they change."""
        for each in adapted:
            d_weight = totals.get(each.name)
            trained = [i for i in each.places if self._factors[i].requires_grad]
            if d_weight is None or not trained:
                continue
            found = torch.autograd.grad(
                each.delta,
                [self._factors[i] for i in trained],
                d_weight.to(each.delta.dtype),
            )
            for i, gradient in zip(trained, found, strict=True):
                total = self._d_factors[i]
                self._d_factors[i] = gradient if total is None else total + gradient


def _compute(part: Any, hidden: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """Return the experts' results (R, C) for R rows, each with one chosen expert of the slice and its weight."""
    chosen, weights = ids[:, None], scales[:, None]
    if (spare := vars(part).get("ring_spare")) is not None:
        chosen = torch.cat([chosen, torch.full_like(chosen, spare)], 1)
        weights = torch.cat([weights, torch.zeros_like(weights)], 1)
    return part.forward(hidden, chosen, weights)


def _add_gradient(parameter: Tensor, found: Tensor | None) -> None:
    """Add to a whole parameter's gradient, which may wait from a pass before.

    It becomes zeros without a row: FSDP sums what every rank has, also one whose tokens chose no expert of a slice.
    """
    if parameter.grad is not None:
        if found is not None:
            parameter.grad += found
    elif found is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    else:
        parameter.grad = found.to(gradient_dtype(parameter))


def _dtype_of_sums(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _gathered(experts: Any) -> Iterator[tuple[int, Any]]:
    """Yield each slice with its number while it is whole and the next one is on its way."""
    slices = [*experts.slices]
    for number, part in enumerate(slices):
        for group in groups_in(part):
            group.unshard()
            group.wait_for_unshard()
        if number + 1 < len(slices):
            _begin_to_gather(slices[number + 1])
        yield number, part


def _begin_to_gather(part: Any) -> None:
    for group in groups_in(part):
        # In FSDP's own streams, as layers are prefetched, so that computing goes on.
        group._prefetch_unshard(group, "forward")


def _leave(part: Any) -> None:
    """Return a slice to its shards after a forward pass, unless its user keeps weights whole."""
    for group in groups_in(part):
        if group.post_forward_mesh_info is not None:
            group.reshard()


def _sharded_in(experts: Any) -> Iterator[Any]:
    """Yield FSDP's records of the parameters of all slices."""
    for part in experts.slices:
        for group in groups_in(part):
            yield from group.fsdp_params


def _has_gradient(parameter: Any) -> bool:
    """Return whether a parameter of FSDP has a gradient, summed over the ranks or waiting to be."""
    whole = getattr(parameter, "_unsharded_param", None)
    gradients = (
        parameter.sharded_param.grad,
        parameter.unsharded_accumulated_grad,
        None if whole is None else whole.grad,
    )
    return any(each is not None for each in gradients)


class _Delta(NamedTuple):
    """Product of one adapter's factors for a weight of a slice, and the places of these among all."""

    name: str
    delta: Tensor
    places: tuple[int, int]


def _active_in(wrapper: Any) -> list[str]:
    """Return the adapters that a wrapper adds to its parameter now."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _factors_in(experts: Any) -> list[Tensor]:
    """Return the two factors of each active adapter of each parameter."""
    return [
        factor.weight
        for wrapper in experts.ring_wrappers
        for name in _active_in(wrapper)
        for factor in (wrapper.lora_A[name], wrapper.lora_B[name])
    ]


@contextmanager
def _adapted(experts: Any, part: Any, number: int) -> Iterator[list[_Delta]]:
    """Add the adapters' parts to a slice's weights while active; yield these parts, with their graphs."""
    held = dict(part._parameters)
    found: list[_Delta] = []
    place = 0
    for wrapper in experts.ring_wrappers:
        name = wrapper.parameter_name
        for adapter in _active_in(wrapper):
            with torch.enable_grad():
                delta = _delta_of(wrapper, adapter, experts.ring_starts[number], held[name])  # fmt: skip
            found.append(_Delta(name, delta, (place, place + 1)))
            place += 2
    for name in {each.name for each in found}:
        weight = held[name].detach().clone()
        for each in found:
            if each.name == name:
                weight += each.delta.detach()
        part._parameters[name] = weight.requires_grad_()
    try:
        yield found
    finally:
        part._parameters.update(held)


def _delta_of(wrapper: Any, adapter: str, first: int, weight: Tensor) -> Tensor:
    """Return the rows that belong to a slice of ``ParamWrapper.get_delta_weight`` of PEFT."""
    rows = slice(first, first + len(weight))
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    a = a.reshape(wrapper.num_experts, -1, a.shape[-1])[rows]
    b = b.reshape(b.shape[0], -1, wrapper.num_experts)[..., rows]
    # (experts, in, out), or where PEFT has swapped them (experts, out, in).
    result = "eoi" if wrapper._did_swap_in_out_features else "eio"
    delta = torch.einsum(f"ore,eri->{result}", b, a) * wrapper.scaling[adapter]
    return delta.to(weight.dtype)


class _Passing(Mixin):
    """PEFT's wrapper of a parameter, whose adapters the slices add."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        return self.base_layer(x, *args, **kwargs)

    merge = unmerge = refusing(_CHANGED)
