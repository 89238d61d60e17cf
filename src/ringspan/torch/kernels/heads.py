"""What operators ask of heads: one size for all of them, or as many key/value heads as query heads."""

from torch import Tensor


def too_large(q: Tensor, v: Tensor, largest: int) -> str | None:
    """Why an operator with heads of so many numbers at most cannot serve; None if it can."""
    size = max(q.shape[-1], v.shape[-1])
    return None if size <= largest else f"its heads have at most {largest} numbers, these have {size}"


def one_size(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """All with the largest head size, rounded up to a multiple, filled up with zeros: these change no score."""
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return tuple(x if x.shape[-1] == size else _filled_up(x, size) for x in tensors)


def _filled_up(x: Tensor, size: int) -> Tensor:
    """A contiguous copy with zeros behind: torch's own ``pad`` gives one by the strides of x, in which a head of a
    single number may pass for channels that come last.
    """
    wider = x.new_empty((*x.shape[:-1], size))
    wider[..., : x.shape[-1]] = x
    wider[..., x.shape[-1] :] = 0
    return wider
