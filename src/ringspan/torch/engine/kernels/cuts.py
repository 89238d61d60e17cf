"""Parts of tensors (B, heads, rows, ...); the tensor itself if a part is everything, which costs no view."""

from torch import Tensor


def heads_of(x: Tensor, heads: slice) -> Tensor:
    """Return ``x[:, heads]``."""
    count = heads.stop - heads.start
    return x if count == x.shape[1] else x.narrow(1, heads.start, count)


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """Return ``x[:, :, rows]``."""
    count = rows.stop - rows.start
    return x if count == x.shape[2] else x.narrow(2, rows.start, count)
