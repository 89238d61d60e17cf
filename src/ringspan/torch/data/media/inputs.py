"""Images, videos and sound of a batch, as of transformers' processors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.lines import refused, shortened
from ringspan.torch.data.padding import marked_tokens
from ringspan.torch.engine.transport.digest import digest_values

# The type of each token, as processors return it.
TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids")
# Keys that ``shard_batch`` takes in addition to the text.
MEDIA: Final = frozenset(
    {
        "batch_num_images",
        "feature_attention_mask",
        "image_grid_thw",
        "image_sizes",
        "input_features",
        "input_features_mask",
        "pixel_attention_mask",
        "pixel_values",
        "pixel_values_videos",
        "second_per_grid_ts",
        "video_grid_thw",
        *TOKEN_TYPES,
    }
)


@dataclass(frozen=True, eq=False)
class Media:
    """Media of a whole batch with their text, equal on a ring, which moves its shares to devices."""

    tokens: Tensor  # whole sequences (B, S), on the CPU
    # True for tokens that are not padding (B, S), on the CPU; None if all are real.
    real: Tensor | None
    inputs: Mapping[str, Tensor]  # the processor's outputs by name
    # Results that a model has computed from these inputs, such as grid positions.
    found: dict[str, Any] = field(default_factory=dict[str, Any])

    def to(self, *_: object, **__: object) -> "Media":
        """Return self: moving a batch to a device does not move images."""
        return self

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> int:
        return sum(digest_values(self.inputs[name]) for name in sorted(self.inputs)) % (
            1 << 62
        )


def media_of(batch: Mapping[str, Any]) -> Media | None:
    """Return a batch's media, None for text alone; UnsupportedError for misshapen or non-numeric inputs."""
    inputs = {
        name: _tensor(name, batch[name])
        for name in sorted(MEDIA)
        if batch.get(name) is not None
    }
    tokens, mask = batch["input_ids"], batch.get("attention_mask")
    for name in TOKEN_TYPES:
        if name in inputs and inputs[name].shape != tokens.shape:
            raise UnsupportedError(
                f"{name} has shape {tuple(inputs[name].shape)}, must have {tuple(tokens.shape)}"
            )
    if not inputs:
        return None
    return Media(
        tokens.cpu(), None if mask is None else marked_tokens(mask).cpu(), inputs
    )


def _tensor(name: str, value: object) -> Tensor:
    """Return an input as a tensor, since models look there for per-image numbers."""
    where = (
        f"{name} must be a tensor or a list of numbers, got a {type(value).__name__}"
    )
    with refused(
        where, TypeError, ValueError, RuntimeError, error_type=UnsupportedError
    ):
        made = torch.as_tensor(value)
    if name.endswith("_grid_thw"):
        check_numbers(name, made, ("frames", "rows", "columns"))
    if name == "second_per_grid_ts" and made.ndim != 1:
        raise UnsupportedError(
            f"{name} must be a number of each video, got the shape {tuple(made.shape)}"
        )
    return made


def check_numbers(name: str, counts: Tensor, columns: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless counts are positive integers, ``columns`` per image."""
    has_form = (
        counts.ndim == 2
        and counts.shape[1] == len(columns)
        and not counts.is_floating_point()
    )
    if not has_form or bool((counts < 1).any()):
        raise UnsupportedError(
            f"{name} must be whole numbers of at least 1, of shape (images, {len(columns)}) for {', '.join(columns)}; "
            f"got {shortened(str(counts.tolist()))}"
        )
