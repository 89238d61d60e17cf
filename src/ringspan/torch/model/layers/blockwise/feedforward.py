"""Feed-forwards and norms in blocks of tokens, recomputed in backward: T x C is kept, not T x intermediate size.

Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models", section 3.
"""

import inspect
import logging
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.layers.blockwise.blocks import kind_of, mixes_tokens
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.weights.loading import filled

_log: Final = logging.getLogger(__name__)


def free_feedforwards(
    view: ModelView, *, checkpointed: bool, logs: bool = True
) -> list[nn.Module]:
    """Return the feed-forwards if blocks of ``FREE_CHUNK_TOKENS`` are nearly free (checkpointed layers), else none."""
    if not checkpointed:
        return []
    try:
        feedforwards = find_feedforwards(view)
    except UnsupportedError as error:
        reason = str(error)
    else:
        reason = _why_not_free(view, feedforwards)
        if not reason:
            return feedforwards
    if logs:
        _log.warning("feed-forwards run on all tokens at once: %s", reason)
    return []


def find_feedforwards(view: ModelView) -> list[nn.Module]:
    """Return each decoder layer's feed-forward, tried out: token-wise (B, T, C) -> (B, T, C), also mixtures of experts.

    UnsupportedError, with why each submodule is excluded, for a layer without one, or with dropout.
    """
    # Layers of one kind share their code, so one of each kind is tried.
    verdicts: dict[Any, str] = {}
    found: list[nn.Module] = []
    for path, layer in view.layers.items():
        reasons: list[str] = []
        here: list[nn.Module] = []
        for name, child in layer.named_children():
            kind = kind_of(child)
            if kind not in verdicts:
                verdicts[kind] = _why_not(child, view.decoder.config.hidden_size)
            if verdicts[kind]:
                reasons.append(f"{name} {verdicts[kind]}")
            else:
                here.append(child)
        if not here:
            raise UnsupportedError(
                f"{view.name} has no feed-forward that can run in chunks in {path}: {'; '.join(reasons)}; "
                "use feedforward_chunk_tokens=0"
            )
        found += here
    if not found:
        raise UnsupportedError(
            f"{view.name} has no decoder layers whose feed-forward could run in chunks"
        )
    return found


def beside_slices(
    feedforwards: Iterable[nn.Module], experts: Container[nn.Module], size: int
) -> list[nn.Module]:
    """Return the feed-forwards; of those with sliced experts, the parts that can run in blocks, such as shared experts.

    In blocks of tokens, a whole mixture would gather all slices for each block. Slices have blocks of their own.
    """
    verdicts: dict[Any, str] = {}
    found: list[nn.Module] = []
    for module in feedforwards:
        if not any(part in experts for part in module.modules()):
            found.append(module)
            continue
        for child in module.children():
            if any(part in experts for part in child.modules()):
                continue
            kind = kind_of(child)
            if kind not in verdicts:
                verdicts[kind] = _why_not(child, size)
            if not verdicts[kind]:
                found.append(child)
    return found


def _why_not(module: nn.Module, size: int) -> str:
    """Return why a layer's submodule is not a feed-forward that can run in blocks of tokens, or ""."""
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
    return mixes_tokens(module, size)


class _Tried(Exception): ...


def _why_not_free(view: ModelView, feedforwards: list[nn.Module]) -> str:
    """Return why blocks are expensive, found by running the first layer: it keeps a tensor after its feed-forward."""
    decoder, layers = view.decoder, [*view.layers.values()]
    layer = layers[0]
    name, feedforward = next(
        (name, child) for name, child in layer.named_children() if child in feedforwards
    )
    is_behind = False
    reasons: list[str] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) != 1 or kwargs:
            reasons.append(f"{name} is called with more than hidden states")

    def leave(*_: object) -> None:
        nonlocal is_behind
        is_behind = True

    # It keeps no tensor, because no backward pass follows.
    def keep(_: Tensor) -> None:
        if is_behind and not reasons:
            reasons.append(
                f"what comes behind {name} needs its result again, so blocks cost one more forward pass"
            )

    def end(*_: object) -> None:
        raise _Tried

    handles = [
        feedforward.register_forward_pre_hook(enter, with_kwargs=True),
        feedforward.register_forward_hook(leave),
        layer.register_forward_hook(end),
    ]
    around = set(decoder.modules()).difference(*(each.modules() for each in layers))
    try:
        with filled(layer), filled(*around, recurse=False, first_rows=True):
            ids = torch.zeros(
                1, 2, dtype=torch.int64, device=next(layer.parameters()).device
            )
            with (
                torch.enable_grad(),
                saved_tensors_hooks(keep, lambda x: x),
                suppress(_Tried),
            ):
                decoder(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever it raises: then nobody knows
        reasons.append(
            f"its first layer could not be tried out ({type(error).__name__})"
        )
    finally:
        for handle in handles:
            handle.remove()
    return f"in {view.name} {reasons[0]}" if reasons else ""


def find_norms(decoder: nn.Module) -> list[nn.Module]:
    """Return the norms worth running in blocks, tried out; PyTorch's own save only their input."""
    verdicts: dict[Any, bool] = {}
    found: list[nn.Module] = []
    for module in decoder.modules():
        shapes = {tuple(p.shape) for p in module.parameters()}
        if (
            len(shapes) != 1
            or len(shape := shapes.pop()) != 1
            or any(True for _ in module.children())
        ):
            continue
        kind = kind_of(module)
        if kind not in verdicts:
            takes_one = len(inspect.signature(module.forward).parameters) == 1
            verdicts[kind] = (
                takes_one
                and not mixes_tokens(module, *shape)
                and _keeps_more(module, *shape)
            )
        if verdicts[kind]:
            found.append(module)
    return found


def _keeps_more(module: nn.Module, size: int) -> bool:
    kept: list[Tensor] = []
    with (
        filled(module),
        torch.enable_grad(),
        saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        like = next(module.parameters())
        tokens = torch.zeros(
            1, 2, size, dtype=like.dtype, device=like.device, requires_grad=True
        )
        module(tokens)
    return any(x is not tokens and x.shape == tokens.shape for x in kept)
