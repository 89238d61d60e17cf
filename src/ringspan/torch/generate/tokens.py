"""Token ids that ranks compare."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError


def check_entries(model: Any, ids: Tensor) -> None:
    vocabulary = model.ring_vocabularies[0]
    if not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise UnsupportedError(f"input_ids has numbers outside of the vocabulary, 0 to {vocabulary - 1}")


def digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def name_of(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")
