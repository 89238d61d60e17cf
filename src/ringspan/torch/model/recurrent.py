"""Layers with states or convolutions: functions looked up by name in transformers' modules compute over spans."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.balanced import batch_layout
from ringspan.core.geometry.layer_mask import Segments
from ringspan.core.geometry.tree import Tree
from ringspan.core.names import BatchLayoutName
from ringspan.core.recurrence.spans import places_of
from ringspan.torch.engine.recurrence import rules
from ringspan.torch.engine.recurrence.current import (
    SequencePass,
    begin_calls,
    current_pass,
)
from ringspan.torch.engine.recurrence.functions import (
    FUNCTIONS,
    SELECTIVE_SCAN,
    StateFunction,
)
from ringspan.torch.engine.recurrence.plan import Starts
from ringspan.torch.engine.recurrence.recurrence import convolution, recurrence, resumed
from ringspan.torch.model.layers.decoder import STATEFUL_LAYERS
from ringspan.torch.model.layers.family import families
from ringspan.torch.model.layers.modules import Mixin, forward_of, local_part, mix_in
from ringspan.torch.model.layers.view import ModelView

_CONVOLUTION: Final = "causal_conv1d_fn"
# Kernels of a whole layer, which neither take nor return states. As None they make a layer call single functions.
_FUSED: Final = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
_PACKED: Final = ("cu_seqlens", "seq_idx")


def stateful_modules(decoder: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose recurrence or convolution can be computed over spans, by path."""
    return {
        path: module
        for path, module in decoder.named_modules()
        if _hooks_of(module) or _own_code_of(module)
    }


def refuse_stateful(view: ModelView) -> None:
    """Raise UnsupportedError for a layer that mixes tokens in an unsupported way."""
    name, decoder, held = view.name, view.decoder, view.stateful
    for path, module in decoder.named_modules():
        parent = path.rpartition(".")[0]
        # A family's mixin replaces ``_short_conv`` (``ringspan.torch.mechanisms.chosen_keys.pooled``).
        is_ours = parent in held or hasattr(
            decoder.get_submodule(parent), "_short_conv"
        )
        if isinstance(module, nn.Conv1d) and not is_ours:
            raise UnsupportedError(
                f"{name} mixes tokens outside of attention: {path} is a convolution that its module computes itself, "
                f"not by {_CONVOLUTION}; see docs/models.md"
            )
    types = getattr(decoder.config, "layer_types", None) or ()
    stateful = sum(kind in STATEFUL_LAYERS for kind in types)
    layers = {path.split(".")[1] for path in held if path.startswith("layers.")}
    if stateful > len(layers):
        raise UnsupportedError(
            f"{name} has {stateful} layers with a state or a convolution, of which {len(layers)} call a function that "
            f"computes spans of them: {', '.join((*_functions(), _CONVOLUTION))}"
        )


def why_no_cache(decoder: nn.Module) -> str | None:
    """Return why transformers' cache cannot hold a decoder's states; None if it can."""
    for path, module in stateful_modules(decoder).items():
        if _own_code_of(module):
            return f"{path} keeps its state in a cache of its own, which a ring does not split"
        if hasattr(module, "n_mamba_heads") and SELECTIVE_SCAN in _hooks_of(module):
            return f"{path} scans its heads one after the other, and a cache on a ring keeps one state for all of them"
    return None


def refuse_spans(view: ModelView, layout: BatchLayoutName, ranks: int, tp: int) -> None:
    """Raise LayoutError for states with non-consecutive tokens, UnsupportedError for states with ``tp`` > 1."""
    if not view.stateful:
        return
    places_of(batch_layout(layout, 4 * ranks, ranks))
    if tp > 1:
        raise UnsupportedError(
            f"{next(iter(view.stateful))} of {type(view.decoder).__name__} has no tensor-parallel plan; use tp=1"
        )


def hook_stateful(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.register_forward_pre_hook(begin_calls)
        if own_code := _own_code_of(module):
            mix_in(module, own_code)
            continue
        space = _code_of(module).__globals__
        for name in (*_hooks_of(module), *_FUSED):
            function = space.get(name)
            if function is not None and not hasattr(function, "ringspan_plain"):
                space[name] = _wrapped(name, function)


def _code_of(module: nn.Module) -> FunctionType:
    return inspect.unwrap(forward_of(module))


def state_of(module: nn.Module) -> StateFunction | None:
    """Return the function that carries a module's state from token to token; None if it only convolves."""
    if own_code := _own_code_of(module):
        return own_code.ring_state
    names = [name for name in _hooks_of(module) if name != _CONVOLUTION]
    return _functions()[names[0]] if names else None


def _functions() -> dict[str, StateFunction]:
    """Return transformers' and families' functions with a state, by name."""
    found = dict(FUNCTIONS)
    for family in families().values():
        found |= family.states
    return found


def _own_code_of(module: nn.Module) -> type["OwnState"] | None:
    """Return the mixin for a module that computes its state in its own code; None if it calls functions."""
    name = type(module).__name__
    return next(
        (each.stateful[name] for each in families().values() if name in each.stateful),
        None,
    )


def _hooks_of(module: nn.Module) -> tuple[str, ...]:
    code = getattr(_code_of(module), "__code__", None)
    return tuple(
        name
        for name in (*_functions(), _CONVOLUTION)
        if code is not None and name in code.co_names
    )


def _wrapped(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of transformers' function ``name`` that computes over the spans of the current pass.

    Outside of a pass it calls the plain function. UnsupportedError for arguments that mark packed documents.
    """
    signature = inspect.signature(plain)
    compute = (
        _fused
        if name in _FUSED
        else _convolved
        if name == _CONVOLUTION
        else functools.partial(_scanned, name, _functions()[name].rule)
    )

    @functools.wraps(plain)
    def over_spans(*args: object, **kwargs: object) -> object:
        sequences = current_pass()
        if sequences is None:
            return plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        further = bound.arguments.pop("kwargs", {})
        for packed in _PACKED:
            if (bound.arguments | further).get(packed) is not None:
                raise UnsupportedError(
                    f"{packed} is not supported on a ring; pack documents with position_ids that start from 0 for "
                    "each, and make the batch with rs.shard_batch"
                )
        if sequences.packed is not None:
            sequences.packed.is_seen = True
        return compute(plain, dict(bound.arguments), further, sequences)

    over_spans.ringspan_plain = plain  # pyright: ignore[reportAttributeAccessIssue]
    return over_spans


def _fused(*_: object) -> None:
    return None


def _convolved(
    plain: rules.Function,
    arguments: dict[str, Any],
    _: dict[str, Any],
    sequences: SequencePass,
) -> Tensor:
    x, weight, bias = (
        arguments.pop(name, None) for name in ("hidden_states", "weight", "bias")
    )
    weight, bias = local_part(weight), None if bias is None else local_part(bias)
    return convolution(plain, x, weight, bias, sequences, **arguments)


def _scanned(
    name: str,
    rule: rules.Rule,
    plain: rules.Function,
    arguments: dict[str, Any],
    further: dict[str, Any],
    sequences: SequencePass,
) -> object:
    """Run a recurrent function over the ring's spans, or over a cache from its states; return what ``plain`` returns.

    ``further``: variable keyword arguments, some of them tensors of the recurrence. UnsupportedError if the caller
    gives or asks for states outside of generation.
    """
    arguments |= {
        name: x for name, x in further.items() if name in rule.dims and x is not None
    }
    asked = {state: arguments.pop(state, None) for state in rule.states}
    if sequences.before is not None:
        return resumed(rule, plain, arguments, sequences, sequences.before.state)
    if any(isinstance(value, Tensor) or value for value in asked.values()):
        raise UnsupportedError(
            f"{name} is asked for states outside of generation; leave use_cache and caches out"
        )
    out = recurrence(rule, plain, arguments, sequences)
    return (out, None) if isinstance(rule, rules.DeltaRule) else out


class OwnState(Mixin):
    """Base of mixins that compute a state over spans in place of a module's own code (``Family.stateful``)."""

    ring_state: StateFunction


def starts_of(rows: Sequence[Segments]) -> Iterator[Starts]:
    for row in rows:
        yield row if isinstance(row, Tree) else tuple(accumulate(row[:-1], initial=0))
