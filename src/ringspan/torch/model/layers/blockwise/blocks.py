"""Token-wise modules in blocks of tokens, computed again in backward: only the input (T x C) is kept."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import type_before_parametrizations

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.numbers import check_whole
from ringspan.torch.engine.kernels.device import rules_of
from ringspan.torch.model.layers.modules import (
    example_of,
    hidden_of,
    hooks_of,
    local_part,
    mix_in,
    trained_in,
)
from ringspan.torch.model.layers.routing import current_routing
from ringspan.torch.model.layers.switches import Switches
from ringspan.torch.model.weights.loading import filled
from ringspan.torch.runtime.autocast import autocast_now

_Run = Callable[[Tensor, slice], tuple[Tensor, ...]]


class RouterRecorder:
    """Collector of router scores (T, E); transformers' own would see single blocks, without gradients."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._routers: set[nn.Module] = set()
        self._scores: list[Tensor] | None = None
        self._block: list[Tensor] | None = None

    def num_wanted(self, module: nn.Module) -> int:
        return (
            0
            if self._scores is None
            else sum(part in self._routers for part in module.modules())
        )

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

        def record(
            _: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]
        ) -> None:
            scores = output[index] if isinstance(output, tuple) else output
            if scores is not None:
                self.add(scores)

        self._routers.add(router)
        router.register_forward_hook(record)


def run_in_blocks(
    modules: list[nn.Module], chunk_tokens: int, option: str, *, from_tokens: int = 0,
    recorder: RouterRecorder | None = None,
) -> None:  # fmt: skip
    """Run token-wise modules on ``chunk_tokens`` at a time, in place, from ``from_tokens``; ConfigError below 1."""
    check_whole(option, chunk_tokens, otherwise="; 0 is for none")
    # Layers may share a module, which takes the mixin once.
    for module in dict.fromkeys(modules):
        mix_in(
            module,
            Blockwise,
            chunk_tokens=chunk_tokens,
            chunk_option=option,
            chunk_from_tokens=from_tokens,
            chunk_recorder=recorder,
        )


def kind_of(module: nn.Module) -> object:
    """Return a key equal for modules with the same code, shapes, dropout and hooks.

    Each parametrized module has a class of its own, for example each layer of packed weights.
    """
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    rates = tuple(
        dropout.p for dropout in module.modules() if isinstance(dropout, nn.Dropout)
    )
    code = tuple(
        (
            type_before_parametrizations(part),
            id(vars(part).get("forward")),
            hooks_of(part),
        )
        for part in module.modules()
    )
    return code, shapes, rates


@torch.no_grad()
def mixes_tokens(
    module: nn.Module, size: int, *, gives: int | None = None, trains: bool = True
) -> str:
    """Return why a module from C numbers per token to C, or ``gives``, cannot run in blocks, found by trial; or ""."""
    with filled(module):
        return _why_mixed(module, size, gives, trains=trains)


def _why_mixed(module: nn.Module, size: int, gives: int | None, *, trains: bool) -> str:
    """Return why a module with its weights in memory cannot run in blocks, or "".

    It runs on made-up tokens (2, n, C): twice as they are, in parts, in another order, and equal ones in one row. Every
    run must give each token the same result up to rounding. Weights on the meta device are replaced by random ones.
    """
    generator = torch.Generator().manual_seed(0)
    if next(module.parameters()).is_meta:
        module = copy.deepcopy(module).to_empty(device="cpu")
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
    like = example_of(module)
    num_tokens = rules_of(like.device).probe_tokens
    tokens = torch.randn(2, num_tokens, size, generator=generator).to(like)
    # A row of equal tokens: a router sends them all to the same experts, where a limit on their number would show.
    tokens[1] = tokens[0, 0]
    order = torch.randperm(num_tokens, generator=generator).to(like.device)

    def run(tokens: Tensor) -> Tensor:
        # Some modules write into their input.
        return hidden_of(module(tokens.clone()))

    with _mode(module, trains):
        try:
            whole = run(tokens)
        except Exception as error:
            return f"does not take hidden states alone ({type(error).__name__})"
        if problem := _why_not_given(whole, tokens, gives):
            return problem
        again = run(tokens)
        try:
            # A single token, and blocks of odd sizes: each token meets other tokens than in the whole run.
            apart = torch.cat(
                [
                    run(part)
                    for part in tokens[:1].tensor_split((1, 3, 8), 1)
                    if part.numel()
                ],
                1,
            )
        except Exception as error:  # for example a batch norm
            return f"does not take one token ({type(error).__name__})"
        in_order = run(tokens[:, order])
    bound = max(1e-5, 8 * torch.finfo(like.dtype).eps) * whole.abs().max()
    if not bool((whole - again).abs().max() <= bound):
        return f"is random in {'training' if trains else 'evaluation'}, and would be drawn again when recomputed"
    others = [whole[:1] - apart, whole[:, order] - in_order, whole[1] - whole[0, 0]]
    if not all(bool(difference.abs().max() <= bound) for difference in others):
        return "mixes tokens"
    return ""


def _why_not_given(whole: Any, tokens: Tensor, gives: int | None) -> str:
    """Return why a result is not hidden states like a module's tokens, or not ``gives`` numbers for each, or ""."""
    wanted = tokens.shape if gives is None else (*tokens.shape[:2], gives)
    is_given = isinstance(whole, Tensor) and whole.shape == wanted
    if gives is not None:
        return "" if is_given else f"does not give {gives} numbers per token"
    is_given = is_given and whole.dtype == tokens.dtype
    return "" if is_given else "does not give hidden states"


@contextmanager
def _mode(module: nn.Module, trains: bool) -> Iterator[None]:
    """Set the training mode; restore modes, buffers (spectral norm changes its own) and random state."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    device = next(module.parameters()).device
    try:
        module.train(trains)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)


class Blockwise:
    chunk_tokens: int
    chunk_option: str
    chunk_from_tokens: int
    chunk_recorder: RouterRecorder | None

    def forward(
        self: Any, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Map (B, T, C) to (B, T, C), a block of the B x T tokens at a time; UnsupportedError for other arguments."""
        whole: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        chunk, recorder = self.chunk_tokens, self.chunk_recorder
        others: list[None] = []
        # Zero tokens make no blocks, and the weights would get no gradient, which FSDP waits for.
        if hidden_states.shape[:-1].numel() < max(1, self.chunk_from_tokens):
            return whole(hidden_states, *args, **kwargs)

        routing = current_routing()

        def run(tokens: Tensor, rows: slice) -> tuple[Tensor, ...]:
            choosing = nullcontext() if routing is None else routing.choosing(rows)
            recording = nullcontext(()) if recorder is None else recorder.block()
            with choosing, recording as scores:
                result = whole(tokens)
            others[:] = [None] * (len(result) - 1 if isinstance(result, tuple) else 0)
            return hidden_of(result), *scores

        if any(each is not None for each in (*args, *kwargs.values())):
            raise UnsupportedError(
                f"{type(self).__name__} was called with more than hidden states; use {self.chunk_option}=0"
            )
        flat = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        parameters = trained_in(self)
        num_scores = 0 if recorder is None else recorder.num_wanted(self)
        experts = recorder.num_experts if recorder else 0
        kept, *places = _Recomputed.apply(
            run, chunk, self, (num_scores, experts), flat, *parameters
        )
        out, *scores = _Computed.apply(run, chunk, kept, *places)
        if recorder is not None:
            for each in scores:
                recorder.add(each)
        out = out.view(hidden_states.shape)
        return (out, *others) if others else out


class _Recomputed(torch.autograd.Function):
    """Identity that recomputes the blocks in backward; the computation, ``_Computed``, follows it.

    A checkpointed layer's recomputation stops here, so the feed-forward runs twice, not three times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: _Run,
        chunk_tokens: int,
        module: nn.Module,
        scores: tuple[int, int],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return hidden states and memoryless placeholders (T, E), which receive the gradients of router scores."""
        ctx.save_for_backward(hidden)
        ctx.run, ctx.chunk_tokens, ctx.module = run, chunk_tokens, module
        ctx.autocast, ctx.as_then = (
            autocast_now(hidden.device.type),
            Switches(module).noted(),
        )
        number, experts = scores
        shape, dtype = (
            (hidden.shape[1], experts),
            torch.promote_types(hidden.dtype, torch.float32),
        )
        return hidden.view_as(hidden), *(
            hidden.new_zeros((), dtype=dtype).expand(shape) for _ in range(number)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with ctx.as_then():
            return _Recomputed.recomputed(ctx, *gradients)

    @staticmethod
    def recomputed(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``forward``'s inputs, recomputing one block of tokens at a time.

        Only one block's activations exist at once. Gradients of parameters are summed over blocks in float32.
        """
        [hidden], [d_out, *d_scores] = ctx.saved_tensors, gradients
        # They are read now, not in forward, because FSDP has gathered the whole parameters again for backward.
        parameters = trained_in(ctx.module)
        sums: list[Tensor | None] = [None] * len(parameters)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[4] else None
        for rows in _blocks(hidden, ctx.chunk_tokens):
            with torch.enable_grad(), ctx.autocast():
                chunk = hidden[:, rows].detach().requires_grad_(d_hidden is not None)
                out, *scores = ctx.run(chunk, rows)
            results, d_results = [out], [d_out[:, rows]]
            # A recorder that is off now gives no scores.
            for each, d_each in zip(scores, d_scores, strict=False):
                if each.requires_grad:
                    results.append(each)
                    d_results.append(d_each[rows].view(each.shape))
            wanted = [chunk, *parameters] if d_hidden is not None else parameters
            # Under autocast a block's results may have another dtype than the gradients.
            d_results = [
                d.to(result.dtype) for d, result in zip(d_results, results, strict=True)
            ]
            parts: list[Tensor | None] = list(
                torch.autograd.grad(results, wanted, d_results, allow_unused=True)
            )
            del out, scores, results, d_results
            if d_hidden is not None:
                d_chunk = parts.pop(0)
                d_hidden[:, rows] = 0 if d_chunk is None else d_chunk
            accumulate(sums, parts, d_out)
        totals = (
            None if s is None else s.to(p.dtype)
            for s, p in zip(sums, parameters, strict=True)
        )
        return None, None, None, None, d_hidden, *totals


class _Computed(torch.autograd.Function):
    """Computation of the blocks that keeps nothing and passes its gradients on to ``_Recomputed``."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, chunk_tokens: int, hidden: Tensor, *places: Tensor
    ) -> tuple[Tensor, ...]:
        """Return hidden states (1, T, C) of all blocks, and router scores (T, E) for each of ``places``."""
        ctx.dtypes = [place.dtype for place in places]
        out = torch.empty_like(hidden)
        scores: list[list[Tensor]] = [[] for _ in places]
        for rows in _blocks(hidden, chunk_tokens):
            out[:, rows], *block = run(hidden[:, rows], rows)
            for parts, part in zip(scores, block, strict=False):
                parts.append(part.flatten(0, -2))
        return out, *(torch.cat(parts) for parts in scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, *d_scores = gradients
        return (
            None,
            None,
            d_out,
            *(d.to(dtype) for d, dtype in zip(d_scores, ctx.dtypes, strict=True)),
        )


def accumulate(
    sums: list[Tensor | None], parts: list[Tensor | None], *others: Tensor
) -> None:
    """Add each part (None: unused expert) to its sum in float32; copy a first part that shares memory."""
    memories = [_memory(tensor) for tensor in (*parts, *others) if tensor is not None]
    for index, part in enumerate(parts):
        if part is None:
            continue
        total = sums[index]
        if total is None:
            if part.dtype.itemsize < 4:
                sums[index] = part.float()
            else:
                sums[index] = (
                    part.clone() if memories.count(_memory(part)) > 1 else part
                )
        else:
            total += part
        parts[index] = None


def _memory(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage()._cdata


def _blocks(hidden: Tensor, chunk_tokens: int) -> Iterator[slice]:
    length = hidden.shape[1]
    return (
        slice(start, min(start + chunk_tokens, length))
        for start in range(0, length, chunk_tokens)
    )
