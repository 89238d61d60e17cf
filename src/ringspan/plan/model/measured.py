"""Cost of a tower from running its code on the meta device: FLOPs, embeddings, kept bytes.

Only floating-point tensors are there; integers, for grids and masks, have values on the CPU: towers loop over them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop
from transformers import AttentionInterface

from ringspan.torch.data.media.cuts import pieces_of

ATTENTION: Final = "ringspan_planned"
"""Attention that keeps what a fused kernel keeps, on a device without kernels."""
_FUSED: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)


class Measured(NamedTuple):
    rows: int
    row: int
    """Numbers in each embedding, those of deeper layers included."""
    saved_bytes: int
    flops: int | None


def measure(
    model: nn.Module,
    compute: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    *,
    count_flops: bool,
) -> Measured:
    """Run a tower (``compute`` of ``inputs``) on the meta device, and its slower backward pass if FLOPs are counted."""
    weights = {id_of(weight) for weight in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        if id_of(x) not in weights:
            # Held, so that no other storage gets its number.
            kept.setdefault(id_of(x), x)
        return x

    def embeddings() -> tuple[int, list[Tensor]]:
        """Return the number of embeddings, and all computed pieces, deeper layers' included."""
        output = compute(**inputs, return_dict=True)
        pieces = [*pieces_of(output.pooler_output)]
        deeper = [
            piece
            for each in getattr(output, "deepstack_features", None) or ()
            for piece in pieces_of(each)
        ]
        return sum(map(len, pieces)), pieces + deeper

    with WithIntegers(), saved_tensors_hooks(note, lambda x: x):
        rows, made = embeddings()
    numbers = sum(piece.numel() for piece in made)
    saved = sum(x.untyped_storage().nbytes() for x in kept.values())
    flops = None
    if count_flops:
        kept.clear()
        counter = FlopCounterMode(
            display=False, custom_mapping={_FUSED: _forward, _FUSED_BACKWARD: _backward}
        )
        with counter, WithIntegers():
            _, made = embeddings()
            torch.autograd.backward(made, [torch.empty_like(piece) for piece in made])
        flops = counter.get_total_flops()
    return Measured(rows, numbers // rows, saved, flops)


def id_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    del module
    out = _FUSED(
        query,
        key,
        value,
        0.0,
        False,
        attn_mask=attention_mask,
        scale=others.get("scaling"),
    )[0]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _fused)


def _forward(
    query: object, key: object, value: object, *_: object, **__: object
) -> int:
    return sdpa_flop(query, key, value)


def _backward(
    _: object, query: object, key: object, value: object, *__: object, **___: object
) -> int:
    # The model's FLOPs leave out the scores that a kernel recomputes.
    return 2 * sdpa_flop(query, key, value)


class WithIntegers(TorchDispatchMode):
    """Create integers on the CPU where the meta device is asked for, and let both meet."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run an operator with integers created on the CPU, and without values if it has meta tensors."""
        del types
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            if func.overloadpacket == torch.ops.aten.index:
                args = args[0], [place for index in args[1] for place in _places(index)]
            args, kwargs = tree_map(_without_values, (args, kwargs))
        elif str(kwargs.get("device")) == "meta" and _is_of_integers(
            func, tensors, args, kwargs
        ):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **(kwargs or {}))


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Return a boolean mask as the indices that it selects, whose number a meta device cannot know."""
    if index is None or index.is_meta or index.dtype != torch.bool:
        return [index]
    return [*index.nonzero(as_tuple=True)]


def _without_values(x: object) -> Any:
    """Move a tensor to the meta device, except a scalar."""
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta and x.ndim else x


def _is_of_integers(
    func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether an operator creates integers, by its dtype, its first tensor or its numbers."""
    if kwargs.get("dtype") is not None:
        return not kwargs["dtype"].is_floating_point
    if tensors:
        return not tensors[0].is_floating_point()
    return func.overloadpacket == torch.ops.aten.arange and all(
        isinstance(number, int) for number in args
    )
