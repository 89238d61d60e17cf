"""Gradient of an embedding: exact sums over equal tokens, in memory independent of the sequence's length.

PyTorch sums the thousands of equal tokens' gradients in the weights' dtype on a CPU, where a bfloat16 sum stops growing
after 256 equal terms, and in T x C float32 numbers on CUDA.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ringspan.torch.engine.attention.part import accumulation_dtype
from ringspan.torch.model.layers.modules import mix_in

# Numbers in the wider dtype at a time: gradients, an equal number of partial sums in CUDA's kernel, and sums.
_NUMBERS: Final = 1 << 23


def sum_embedding_gradients(model: PreTrainedModel) -> None:
    """Make every embedding sum its gradient by ``embedding_gradient``, in place, also inside an adapter."""
    # An adapter looks embeddings up in its own forward, so the mode must enclose that one.
    outermost: nn.Module | None = (
        model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    )
    for module in model.modules():
        if module is outermost or (
            isinstance(module, nn.Embedding) and not own_gradient(module)
        ):
            mix_in(module, _Summed)


def own_gradient(embedding: nn.Embedding) -> str:
    """Return the option that gives an embedding its own gradient or weights; empty if none."""
    if embedding.max_norm is not None:
        return f"max_norm={embedding.max_norm}"
    return (
        "sparse=True"
        if embedding.sparse
        else "scale_grad_by_freq=True"
        if embedding.scale_grad_by_freq
        else ""
    )


def embedding_gradient(
    gradient: Tensor,
    tokens: Tensor,
    num_embeddings: int,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute ``zeros(V, C).index_add_(0, tokens, gradient)`` in float64 on a CPU, float32 on CUDA.

    From rows' gradients (T, C) and their numbers (T,), except ``padding_idx``'s, to (V, C), rounded once to the dtype
    of ``gradient``. Works on some columns at a time: at most 8 M numbers in addition to the result.
    """
    dtype = (
        torch.float64
        if gradient.device.type == "cpu"
        else accumulation_dtype(gradient.dtype)
    )
    # Columns are summed independently, so any split along C gives the same bits.
    columns = max(1, _NUMBERS // (num_embeddings + 2 * len(tokens)))
    total = gradient.new_empty(num_embeddings, gradient.shape[1])
    left_out = -1 if padding_idx is None else padding_idx
    for start in range(0, gradient.shape[1], columns):
        part = gradient[:, start : start + columns].to(dtype)
        total[:, start : start + columns] = torch.ops.aten.embedding_dense_backward(
            part, tokens, num_embeddings, left_out, False
        )
    return total


class _Summed(nn.Module):
    def forward(self, *args: object, **kwargs: object) -> Tensor:
        with _Lookups():
            return super().forward(*args, **kwargs)


class _Lookups(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> object:
        return (_look_up if func is functional.embedding else func)(
            *args, **(kwargs or {})
        )


def _look_up(
    input: Tensor,  # torch's name: callers may pass it by keyword
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    # These options change gradients or weights; ``parallelize`` refuses them in the model's own embeddings.
    if max_norm is not None or scale_grad_by_freq or sparse:
        return functional.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return _LookUp.apply(input, weight, padding_idx)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_embeddings, ctx.padding_idx = len(weight), padding_idx
        return functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [tokens] = ctx.saved_tensors
        rows = gradients[0].flatten(0, -2)
        return (
            None,
            embedding_gradient(
                rows, tokens.flatten(), ctx.num_embeddings, ctx.padding_idx
            ),
            None,
        )
