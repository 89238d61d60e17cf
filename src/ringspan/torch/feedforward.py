"""The feed-forward in blocks of tokens, found in any Hugging Face model: its intermediates never exist whole.

B batch, T local tokens, C hidden size, F intermediate size.

Attention mixes tokens and everything else in a layer does not, so a feed-forward can run on a block of tokens at a time
and again, a block at a time, in backward: it keeps its input (T x C) instead of everything in between (several T x F).
Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models", section 3.
"""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ringspan.core.arguments import FREE_CHUNK_TOKENS
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.torch.modules import mix_in

ChunkTokens = int | Literal["auto"]

# Tokens of the probe: enough for a router that fills experts to a capacity to drop some when all choose alike.
_PROBE_TOKENS: Final = 24

_log: Final = logging.getLogger(__name__)


def free_chunk_tokens(model: PreTrainedModel, *, checkpointed: bool, logs: bool = True) -> int:
    """Tokens at a time for feed-forwards where that costs next to nothing; 0, for all at once, where it does not.

    A checkpointed layer computes its feed-forward again in any case, once, unless it keeps something that comes behind
    it, such as the input of a norm: then blocks would be computed a third time. Why a checkpointed model goes without
    is said in the log where ``logs``.
    """
    if not checkpointed:
        return 0
    try:
        feedforwards = find_feedforwards(model)
    except UnsupportedError as error:
        reason = str(error)
    else:
        reason = _why_not_free(model, feedforwards)
    if reason and logs:
        _log.warning("feed-forwards run on all tokens at once: %s", reason)
    return 0 if reason else FREE_CHUNK_TOKENS


def chunk_feedforwards(model: PreTrainedModel, chunk_tokens: int) -> None:
    """Run the feed-forward of every decoder layer on ``chunk_tokens`` tokens at a time, forward and backward, in place.

    A feed-forward is what a layer calls with its hidden states (B, T, C) alone, gets the same shape from, and what
    treats each token by itself. The last is tried out, on made-up tokens: alone, in another order, and all at once must
    give the same. MLPs, gated MLPs and mixtures of experts that drop no token pass; what a mixture returns beside its
    hidden states (a router's scores) becomes None.

    Raises:
        ConfigError: ``chunk_tokens`` below one.
        UnsupportedError: a layer has no such submodule, or it has dropout; by name.
    """
    run_in_blocks(find_feedforwards(model), chunk_tokens)


def run_in_blocks(feedforwards: list[nn.Module], chunk_tokens: int) -> None:
    """What ``chunk_feedforwards`` does to those that it finds; what they did before this, they do in each block."""
    if chunk_tokens < 1:
        raise ConfigError(f"feedforward_chunk_tokens must be at least 1, got {chunk_tokens}; 0 is for none")
    for module in feedforwards:
        mix_in(module, _Blockwise, feedforward_chunk_tokens=chunk_tokens)


def find_feedforwards(model: PreTrainedModel) -> list[nn.Module]:
    """The feed-forward of each decoder layer, in order; see ``chunk_feedforwards``.

    Raises:
        UnsupportedError: a layer has none; the message says what each of its submodules lacks.
    """
    size = model.config.get_text_config().hidden_size
    verdicts: dict[Any, str] = {}  # layers of one kind share their code: one of each is tried
    found: list[nn.Module] = []
    for path, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        reasons: list[str] = []
        here: list[nn.Module] = []
        for name, child in layer.named_children():
            kind = _kind(child)
            if kind not in verdicts:
                verdicts[kind] = _why_not(child, size)
            if verdicts[kind]:
                reasons.append(f"{name} {verdicts[kind]}")
            else:
                here.append(child)
        if not here:
            raise UnsupportedError(
                f"{type(model).__name__} has no feed-forward that can run in chunks in {path}: {'; '.join(reasons)}; "
                "use feedforward_chunk_tokens=0"
            )
        found += here
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no decoder layers whose feed-forward could run in chunks")
    return found


def _kind(module: nn.Module) -> Any:
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    rates = tuple(dropout.p for dropout in module.modules() if isinstance(dropout, nn.Dropout))
    return type(module), shapes, rates


def _why_not(module: nn.Module, size: int) -> str:
    """What keeps a submodule from being a feed-forward that can run in chunks; empty when nothing does."""
    if not any(p.ndim > 1 for p in module.parameters()):
        return "has no matrices"
    if isinstance(module, nn.Linear):
        return "is a part of a feed-forward"
    required = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) != 1:
        return f"takes {', '.join(required) or 'nothing'}"
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            return f"has dropout {part.p}, which would differ by chunk"
    return _mixes_tokens(module, size)


@torch.no_grad()
def _mixes_tokens(module: nn.Module, size: int) -> str:
    """Try the module on tokens together, apart, in another order and all alike."""
    parameters = list(module.parameters())
    generator = torch.Generator().manual_seed(0)
    if parameters[0].is_meta:
        module = copy.deepcopy(module).to_empty(device="cpu")
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
    like = next(module.parameters())
    tokens = torch.randn(2, _PROBE_TOKENS, size, generator=generator).to(like)
    tokens[1] = tokens[0, 0]  # one row of equal tokens, which a router sends to the same experts
    order = torch.randperm(_PROBE_TOKENS, generator=generator).to(like.device)
    try:
        whole = module(tokens)
    except Exception as error:  # whatever it raises: it does not take hidden states alone
        return f"does not take hidden states alone ({type(error).__name__})"
    whole = _hidden(whole)
    if not isinstance(whole, Tensor) or whole.shape != tokens.shape or whole.dtype != tokens.dtype:
        return "does not give hidden states"
    apart = torch.cat([_hidden(module(tokens[:1, i : i + 1])) for i in range(_PROBE_TOKENS)], 1)
    others = [whole[:1] - apart, whole[:, order] - _hidden(module(tokens[:, order])), whole[1] - whole[0, 0]]
    bound = max(1e-5, 8 * torch.finfo(like.dtype).eps) * whole.abs().max()
    if not all(bool(difference.abs().max() <= bound) for difference in others):
        return "mixes tokens"
    return ""


class _Tried(Exception):
    """Ends a trial behind the first layer."""


def _why_not_free(model: PreTrainedModel, feedforwards: list[nn.Module]) -> str:
    """Run the first layer, as its model does, on two tokens: what makes blocks dear or impossible; empty for nothing.

    A layer is computed again up to the last tensor that it keeps: as long as none comes behind its feed-forward, that
    one's result is not needed again.
    """
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    name, feedforward = next((name, child) for name, child in layer.named_children() if child in feedforwards)
    is_behind = False
    reasons: list[str] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if len(args) != 1 or kwargs:
            reasons.append(f"{name} is called with more than hidden states")

    def leave(*_: Any) -> None:
        nonlocal is_behind
        is_behind = True

    def keep(_: Tensor) -> None:  # nothing is kept: there is no backward pass
        if is_behind and not reasons:
            reasons.append(f"what comes behind {name} needs its result again, so blocks cost one more forward pass")

    def end(*_: Any) -> None:
        raise _Tried

    handles = [
        feedforward.register_forward_pre_hook(enter, with_kwargs=True),
        feedforward.register_forward_hook(leave),
        layer.register_forward_hook(end),
    ]
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(layer.parameters()).device)
    try:
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x), suppress(_Tried):
            model.base_model(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever it raises: then nobody knows
        reasons.append(f"its first layer could not be tried out ({type(error).__name__})")
    finally:
        for handle in handles:
            handle.remove()
    return f"in {type(model).__name__} {reasons[0]}" if reasons else ""


def _hidden(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


class _Blockwise:
    """What ``chunk_feedforwards`` adds to a module's class."""

    feedforward_chunk_tokens: int

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(B, T, C) -> (B, T, C), a block of the B x T tokens at a time."""
        whole: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        chunk = self.feedforward_chunk_tokens
        others: list[None] = []

        def run(tokens: Tensor) -> Tensor:
            result = whole(tokens)
            others[:] = [None] * (len(result) - 1 if isinstance(result, tuple) else 0)
            return _hidden(result)

        if args or kwargs:
            raise UnsupportedError(
                f"{type(self).__name__} was called with more than hidden states; use feedforward_chunk_tokens=0"
            )
        flat = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        parameters = [p for p in self.parameters() if p.requires_grad]
        kept = _Recomputed.apply(run, chunk, self, flat, *parameters)
        out = _Computed.apply(run, chunk, kept).view(hidden_states.shape)
        return (out, *others) if others else out


class _Recomputed(torch.autograd.Function):
    """Passes hidden states through, and in backward computes the blocks again for their gradients.

    The computation is an operation of its own (``_Computed``) behind this one, so that what is kept is kept before it:
    the recomputation of a checkpointed layer ends with the last tensor that it keeps, which in most models is this one,
    and the feed-forward then runs twice in all, not three times.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, chunk_tokens: int, module: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run, ctx.chunk_tokens, ctx.module = run, chunk_tokens, module
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [hidden], [d_out] = ctx.saved_tensors, gradients
        # FSDP has put the whole parameters back in their places.
        parameters = [p for p in ctx.module.parameters() if p.requires_grad]
        sums: list[Tensor | None] = [None] * len(parameters)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        for rows in _blocks(hidden, ctx.chunk_tokens):
            with torch.enable_grad():
                chunk = hidden[:, rows].detach().requires_grad_(d_hidden is not None)
                out = ctx.run(chunk)
            wanted = [chunk, *parameters] if d_hidden is not None else parameters
            parts: list[Tensor | None] = list(torch.autograd.grad(out, wanted, d_out[:, rows], allow_unused=True))
            del out
            if d_hidden is not None:
                d_chunk = parts.pop(0)
                d_hidden[:, rows] = 0 if d_chunk is None else d_chunk
            _accumulate(sums, parts, d_out)
        totals = (None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True))
        return None, None, None, d_hidden, *totals


class _Computed(torch.autograd.Function):
    """Computes the blocks and keeps nothing: its gradient goes to ``_Recomputed`` as it is."""

    @staticmethod
    def forward(ctx: Any, run: Any, chunk_tokens: int, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        for rows in _blocks(hidden, chunk_tokens):
            out[:, rows] = run(hidden[:, rows])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, gradients[0]


def _accumulate(sums: list[Tensor | None], parts: list[Tensor | None], d_out: Tensor) -> None:
    """Add each part to its sum, which is at least float32; an expert that no token of a block chose has no part."""
    for index, part in enumerate(parts):
        if part is None:
            continue
        total = sums[index]
        if total is None:
            sums[index] = part.float() if part.dtype.itemsize < 4 else part if _owns(part, d_out) else part.clone()
        else:
            total += part
        parts[index] = None


def _owns(part: Tensor, d_out: Tensor) -> bool:
    """Whether a gradient has memory of its own, not that of the one it was made from."""
    local = part.to_local() if isinstance(part, DTensor) else part
    return local.untyped_storage()._cdata != d_out.untyped_storage()._cdata


def _blocks(hidden: Tensor, chunk_tokens: int) -> Iterator[slice]:
    length = hidden.shape[1]
    return (slice(start, min(start + chunk_tokens, length)) for start in range(0, length, chunk_tokens))
