"""What operators ask of heads: one size for all of them, or as many key/value heads as query heads."""

from torch import Tensor
from torch.nn.functional import pad


def too_large(q: Tensor, v: Tensor, largest: int) -> str | None:
    """Why an operator with heads of so many numbers at most cannot serve; None if it can."""
    size = max(q.shape[-1], v.shape[-1])
    return None if size <= largest else f"its heads have at most {largest} numbers, these have {size}"


def one_size(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """All with the largest head size, rounded up to a multiple, filled up with zeros: these change no score."""
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return tuple(x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors)


def neighbours(x: Tensor) -> Tensor:
    """The tensor, or a copy whose heads' numbers lie beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()
