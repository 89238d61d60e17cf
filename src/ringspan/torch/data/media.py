"""What a batch holds beside its text: images, videos and sound, as the processors of transformers make them.

B batch, S global tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.lines import one_line, shortened
from ringspan.torch.data.padding import marked_tokens
from ringspan.torch.transport.digest import digest_values

# Of which kind each token is, as processors say it.
_TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids")
# What ``shard_batch`` takes beside the text.
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
        *_TOKEN_TYPES,
    }
)


@dataclass(frozen=True, eq=False)
class Media:
    """The images, videos and sound of a whole batch and the text that they belong to, the same on every rank of a ring.

    A forward pass takes this rank's share of the images to its device. They stay where they are until then, so that no
    device holds all of them.
    """

    tokens: Tensor
    """The whole sequences (B, S), on the CPU."""
    real: Tensor | None
    """Which tokens are no padding (B, S), on the CPU; None for all of them."""
    inputs: Mapping[str, Tensor]
    """What the processor returned, by its names."""
    found: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a model has found out of it, so that it is computed once."""

    def to(self, *_: Any, **__: Any) -> "Media":
        """Itself: what moves a batch to a device leaves images where they are."""
        return self

    def __len__(self) -> int:
        """Examples."""
        return len(self.tokens)

    @property
    def digest(self) -> int:
        """A number that depends on every entry of the inputs."""
        return sum(digest_values(self.inputs[name]) for name in sorted(self.inputs)) % (1 << 62)


def media_of(batch: Mapping[str, Any]) -> Media | None:
    """What a batch holds beside its text; None for text alone.

    Raises:
        UnsupportedError: token types of another shape than the tokens, grids of other shapes or dtypes than they have,
            what is no numbers.
    """
    inputs = {name: _tensor(name, batch[name]) for name in sorted(MEDIA) if batch.get(name) is not None}
    tokens, mask = batch["input_ids"], batch.get("attention_mask")
    for name in _TOKEN_TYPES:
        if name in inputs and inputs[name].shape != tokens.shape:
            raise UnsupportedError(f"{name} has shape {tuple(inputs[name].shape)}, input_ids {tuple(tokens.shape)}")
    if not inputs:
        return None
    return Media(tokens.cpu(), None if mask is None else marked_tokens(mask).cpu(), inputs)


def _tensor(name: str, value: Any) -> Tensor:
    """An input as a tensor, which is where models look for a number of each image."""
    try:
        made = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"{name} must be a tensor or a list of numbers, got a {type(value).__name__}: {one_line(error)}"
        ) from error
    if name.endswith("_grid_thw"):
        check_numbers(name, made, ("frames", "rows", "columns"))
    if name == "second_per_grid_ts" and made.ndim != 1:
        raise UnsupportedError(f"{name} must be a number of each video, got the shape {tuple(made.shape)}")
    return made


def check_numbers(name: str, counts: Tensor, columns: tuple[str, ...]) -> None:
    """Refuse what does not say so many counts of each image.

    Raises:
        UnsupportedError: another shape than (images, columns), no integers, a count below 1.
    """
    has_form = counts.ndim == 2 and counts.shape[1] == len(columns) and not counts.is_floating_point()
    if not has_form or bool((counts < 1).any()):
        raise UnsupportedError(
            f"{name} must be whole numbers of at least 1, of shape (images, {len(columns)}) for {', '.join(columns)}; "
            f"got {shortened(str(counts.tolist()))}"
        )
