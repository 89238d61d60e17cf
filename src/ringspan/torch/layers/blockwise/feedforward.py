"""The feed-forward in blocks of tokens, found in any Hugging Face model: its intermediates never exist whole.

B batch, T local tokens, C hidden size, F intermediate size.

Attention mixes tokens and everything else in a layer does not, so a feed-forward can run on a block of tokens at a time
and again, a block at a time, in backward: it keeps its input (T x C) instead of everything in between (several T x F).
Source: Liu and Abbeel 2023, "Blockwise Parallel Transformer for Large Context Models", section 3.
"""

import inspect
import logging
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.layers.blockwise.blocks import kind_of, mixes_tokens, run_in_blocks
from ringspan.torch.layers.decoder import decoder_of, layers_of
from ringspan.torch.weights.loading import filled

_log: Final = logging.getLogger(__name__)


def free_feedforwards(model: PreTrainedModel, *, checkpointed: bool, logs: bool = True) -> list[nn.Module]:
    """The feed-forwards, where running them in blocks of ``FREE_CHUNK_TOKENS`` costs next to nothing; else none.

    A checkpointed layer computes its feed-forward again in any case, once, unless it keeps something that comes behind
    it, such as the input of a norm: then blocks would be computed a third time. Why a checkpointed model goes without
    is said in the log where ``logs``.
    """
    if not checkpointed:
        return []
    try:
        feedforwards = find_feedforwards(model)
    except UnsupportedError as error:
        reason = str(error)
    else:
        reason = _why_not_free(model, feedforwards)
        if not reason:
            return feedforwards
    if logs:
        _log.warning("feed-forwards run on all tokens at once: %s", reason)
    return []


def chunk_feedforwards(model: PreTrainedModel, chunk_tokens: int) -> None:
    """Run the feed-forward of every decoder layer on ``chunk_tokens`` tokens at a time, forward and backward, in place.

    A feed-forward is what a layer calls with its hidden states (B, T, C) alone, gets the same shape from, and what
    treats each token by itself. The last is tried out, on made-up tokens: alone, in another order, and all at once must
    give the same. MLPs, gated MLPs and mixtures of experts that drop no token pass; what a mixture returns beside its
    hidden states (a router's scores) becomes None. For its auxiliary loss scores are recorded in the blocks.

    Raises:
        ConfigError: ``chunk_tokens`` below one.
        UnsupportedError: a layer has no such submodule, or it has dropout; by name.
    """
    run_in_blocks(find_feedforwards(model), chunk_tokens, "feedforward_chunk_tokens")


def find_feedforwards(model: PreTrainedModel) -> list[nn.Module]:
    """The feed-forward of each decoder layer, in order; see ``chunk_feedforwards``.

    Raises:
        UnsupportedError: a layer has none; the message says what each of its submodules lacks.
    """
    decoder = decoder_of(model)
    verdicts: dict[Any, str] = {}  # layers of one kind share their code: one of each is tried
    found: list[nn.Module] = []
    for path, layer in layers_of(decoder).items():
        reasons: list[str] = []
        here: list[nn.Module] = []
        for name, child in layer.named_children():
            kind = kind_of(child)
            if kind not in verdicts:
                verdicts[kind] = _why_not(child, decoder.config.hidden_size)
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
    return mixes_tokens(module, size)


class _Tried(Exception):
    """Ends a trial behind the first layer."""


def _why_not_free(model: PreTrainedModel, feedforwards: list[nn.Module]) -> str:
    """Run the first layer, as its model does, on two tokens: what makes blocks dear or impossible; empty for nothing.

    A layer is computed again up to the last tensor that it keeps: as long as none comes behind its feed-forward, that
    one's result is not needed again.
    """
    decoder = decoder_of(model)
    layers = [*layers_of(decoder).values()]
    layer = layers[0]
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
    around = set(decoder.modules()).difference(*(each.modules() for each in layers))
    try:
        with filled(layer), filled(*around, recurse=False, first_rows=True):
            ids = torch.zeros(1, 2, dtype=torch.int64, device=next(layer.parameters()).device)
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x), suppress(_Tried):
                decoder(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever it raises: then nobody knows
        reasons.append(f"its first layer could not be tried out ({type(error).__name__})")
    finally:
        for handle in handles:
            handle.remove()
    return f"in {type(model).__name__} {reasons[0]}" if reasons else ""
