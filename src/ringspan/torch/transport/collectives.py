"""What each rank has to say, told to all of them."""

from typing import Any

import torch.distributed as dist


def gather(thing: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The thing of each rank of a group (the default one when None), by rank, on every rank; pickled on the way."""
    things: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(things, thing, group=group)
    return things
