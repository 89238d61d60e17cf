"""What operators ask of heads: one size for all of them, or as many key/value heads as query heads."""

from torch import Tensor
from torch.nn.functional import pad


def one_size(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """All with the largest head size, rounded up to a multiple, filled up with zeros: these change no score."""
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return tuple(x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors)
