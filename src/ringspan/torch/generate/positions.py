"""Positions of new tokens behind those that a cache holds, and how far the text has come with each.

An image of many tokens takes few positions (M-RoPE): behind one, a position is not the number of tokens before it.
The cache keeps the difference for each token, its shift, so that any later pass goes on from there, whoever calls it.

B batch, n new tokens, L tokens in all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringspan.torch.data.media import Media
from ringspan.torch.generate.cache.cache import RingCache
from ringspan.torch.multimodal.kinds import has_grid_positions


def new_positions(
    model: Any, cache: RingCache, rows: int, count: int, mask: Tensor | None, media: Media | None
) -> Tensor:
    """Where so many new tokens are: (B, n), or (4, B, n) with images, whose tokens have a time, a row and a column too.

    Args:
        model: on a ring.
        cache: of the tokens before.
        rows: sequences; the cache may hold each of them several times.
        count: new tokens n.
        mask: which of all tokens are no padding (B, L).
        media: of the new tokens.
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
    return torch.cat((text.expand(1, rows, -1), media.found["positions"] + reached + shift))


def new_shifts(cache: RingCache, positions: Tensor, mask: Tensor | None) -> Tensor:
    """How much further than its number of tokens the text has come with each new one (B, n), given their positions.

    What follows an image or a video begins behind its last row and column, however long a video is.
    """
    rows, count = positions.shape[-2:]
    reached = (positions if positions.ndim == 2 else positions[-2:].amax(0)).cpu() + 1
    if mask is None:
        return reached - torch.arange(cache.shares.length + 1, cache.shares.length + count + 1)
    new = mask[:, -count:].cpu().long()
    before = mask[:, :-count].sum(-1, keepdim=True).cpu()  # summed where the mask is: a whole text is long
    shifts = torch.cat((cache.last_shifts(rows), reached - (before + new.cumsum(-1))), 1)
    last_real = (torch.arange(1, count + 1) * (new != 0)).cummax(1).values
    return shifts.gather(1, last_real)  # with padding, it comes no further


def whole_positions(model: Any, cache: RingCache, ids: Tensor, mask: Tensor | None, media: Media | None) -> Tensor:
    """What ``generate`` is given for a text that goes on behind a cache: positions of all L tokens, of which it takes
    those of the new ones.
    """
    count = (ids if mask is None else mask).shape[1] - cache.shares.length
    return pad(new_positions(model, cache, len(ids), count, mask, media), (cache.shares.length, 0)).to(ids.device)
