"""Positions of n new tokens after cached ones, L in all, and their shifts: an image's tokens take few (M-RoPE)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringspan.torch.data.media.inputs import Media
from ringspan.torch.generate.cache.cache import RingCache
from ringspan.torch.mechanisms.media.kinds import has_grid_positions
from ringspan.torch.model.layers.view import RingModel


def new_positions(
    model: RingModel,
    cache: RingCache,
    rows: int,
    count: int,
    mask: Tensor | None,
    media: Media | None,
) -> Tensor:
    """Return the positions of new tokens: (B, n), or (4, B, n) with images, which have a time, row and column too.

    ``rows``: B, a multiple of the cache's. ``mask``: real tokens among all (B, L). ``media``: the new tokens'.
    """
    before = cache.shares.length
    text = torch.arange(before, before + count)[None]
    reached: int | Tensor = before
    if mask is not None:
        text = (mask.cpu().long().cumsum(-1) - 1).clamp_min(0)[:, -count:]
        reached = mask[:, :before].cpu().long().sum(-1, keepdim=True)
    if not has_grid_positions(model):
        return text
    shift = cache.last_shifts(rows)
    if media is None or "positions" not in media.found:
        return text + shift
    return torch.cat(
        (text.expand(1, rows, -1), media.found["positions"] + reached + shift)
    )


def new_shifts(cache: RingCache, positions: Tensor, mask: Tensor | None) -> Tensor:
    """Return the shift of each new token (B, n): the position after it, less the number of tokens up to it.

    Text tokens have a shift of 0; an image's many tokens take few positions, so the text after it has a negative one.
    ``mask``: real tokens among all (B, L). Padding counts for nothing and keeps the shift of the last real token.
    """
    # The text after an image or video starts after its last row or column, however long the video is.
    rows, count = positions.shape[-2:]
    reached = (positions if positions.ndim == 2 else positions[-2:].amax(0)).cpu() + 1
    if mask is None:
        return reached - torch.arange(
            cache.shares.length + 1, cache.shares.length + count + 1
        )
    new = mask[:, -count:].cpu().long()
    # The sum runs on the mask's device; only its result is copied to the CPU.
    before = mask[:, :-count].sum(-1, keepdim=True).cpu()
    shifts = torch.cat(
        (cache.last_shifts(rows), reached - (before + new.cumsum(-1))), 1
    )
    last_real = (torch.arange(1, count + 1) * (new != 0)).cummax(1).values
    return shifts.gather(1, last_real)


def whole_positions(
    model: RingModel,
    cache: RingCache,
    ids: Tensor,
    mask: Tensor | None,
    media: Media | None,
) -> Tensor:
    """Compute positions of all L tokens after a cache; ``generate`` takes the new ones'."""
    count = (ids if mask is None else mask).shape[1] - cache.shares.length
    return pad(
        new_positions(model, cache, len(ids), count, mask, media),
        (cache.shares.length, 0),
    ).to(ids.device)
