"""The weights that an adapter was trained over: a fingerprint in its folder, which is checked when it is opened.

Weights of equal shapes merge without an error whatever model they are from.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import read_small
from ringspan.core.messages.lines import refused
from ringspan.torch.model.weights.deferred import part
from ringspan.torch.model.weights.files import WeightFiles, folder_of

RECORD: Final = "base_weights.json"
_PLACES: Final = 4  # places in a tensor, evenly along its first dimension
_NUMBERS: Final = 256  # at each place, at most


def note_base(adapter: Path, base: PreTrainedModel) -> None:
    """Record in an adapter's folder the weights that its base was loaded from, if their files can still be read."""
    name = getattr(base.config, "name_or_path", None)
    if not name:
        return
    try:
        folder = folder_of(name, local_files_only=True)
        digest = _fingerprint(WeightFiles(folder, base.config, adapter=True))
    # The model was not loaded from safetensors files.
    except (
        ConfigError,
        OSError,
        ValueError,
    ):
        return
    (adapter / RECORD).write_text(
        json.dumps({"base_model_name_or_path": str(name), "sha256": digest}) + "\n"
    )


def check_base(adapter: Path, base: str, files: WeightFiles) -> None:
    """Raise ConfigError if an adapter's folder records other weights than these of its base."""
    path = adapter / RECORD
    if not path.is_file():  # PEFT wrote the folder without a record
        return
    with refused(
        f"{path}: is no record of a base model",
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):
        record = json.loads(read_small(path))
        began, expected = record["base_model_name_or_path"], record["sha256"]
    if _fingerprint(files) != expected:
        raise ConfigError(
            f"{adapter}: was trained over other weights than those in {base} (then {began}); set "
            f"base_model_name_or_path in its adapter_config.json to these, or remove {RECORD} to open it nevertheless"
        )


def _fingerprint(files: WeightFiles) -> str:
    """Compute SHA-256 of names, dtypes, shapes and a sample of numbers, the same for every division into files."""
    digest = hashlib.sha256()
    for name in sorted(files.tensors):
        tensor = files.tensors[name]
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        for sample in _samples(tensor):
            digest.update(
                sample.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def _samples(tensor: Tensor) -> list[Tensor]:
    """Return parts of a tensor at up to four places along its first dimension, each of at most 256 numbers."""
    if not tensor.ndim or not tensor.numel():
        return [part(tensor, ()).reshape(1)] if tensor.numel() else []
    rows, *others = tensor.shape
    count = _NUMBERS if not others else 1
    inner = tuple(slice(0, 1) for _ in others[:-1])
    last = (slice(0, min(_NUMBERS, others[-1])),) if others else ()
    starts = sorted(
        {place * (rows - 1) // max(1, _PLACES - 1) for place in range(_PLACES)}
    )
    return [
        part(tensor, (slice(start, min(start + count, rows)), *inner, *last))
        for start in starts
    ]
