"""Head sizes and counts that operators require."""

from torch import Tensor


def too_large(q: Tensor, v: Tensor, largest: int) -> str | None:
    size = max(q.shape[-1], v.shape[-1])
    return None if size <= largest else f"its heads have at most {largest} numbers, these have {size}"


def one_size(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Pad all heads with zeros to the largest size, rounded up to a multiple: scores do not change."""
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return tuple(x if x.shape[-1] == size else _filled_up(x, size) for x in tensors)


def _filled_up(x: Tensor, size: int) -> Tensor:
    """Return a contiguous copy: torch's ``pad`` may take a head of size 1 for channels-last."""
    wider = x.new_empty((*x.shape[:-1], size))
    wider[..., : x.shape[-1]] = x
    wider[..., x.shape[-1] :] = 0
    return wider
