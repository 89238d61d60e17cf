"""Cuts of tower inputs into independent units (a frame, an image, an example's images, a sound window), in order."""

# I images, V videos, F frames, P patches, C channels.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llava_onevision.modeling_llava_onevision import (
    image_size_to_num_patches,
)

from ringspan.core.errors import UnsupportedError
from ringspan.torch.data.media.inputs import check_numbers

Inputs = Mapping[str, Tensor]


_OTHER: Final = "; the processor must be that of the model"
# Towers with a table of positions for images of one size.
_OF_ONE_SIZE: Final = (
    "clip_vision_model",
    "internvl_vision",
    "llama4_vision_model",
    "siglip_vision_model",
)


@dataclass(frozen=True)
class Cut:
    """Tower inputs with an image per row: the given ones of ``names``, pixels first."""

    names: tuple[str, ...]
    needs_all: bool = False  # True if the tower takes no pixels without the others
    form: ClassVar[str] = "(images, channels, height, width)"  # dimensions of pixels

    @property
    def pixels(self) -> str:
        return self.names[0]

    def given(self, inputs: Inputs) -> dict[str, Tensor]:
        return {name: inputs[name] for name in self.names if name in inputs}

    def check(self, inputs: Inputs) -> None:
        """Raise UnsupportedError for pixels of another form, missing inputs, or unequal numbers of images."""
        if inputs[self.pixels].ndim != len(self.form.split(",")):
            raise UnsupportedError(
                f"{self.pixels} must be {self.form}, got {tuple(inputs[self.pixels].shape)}"
            )
        if self.needs_all and (
            lacking := [name for name in self.names if name not in inputs]
        ):
            raise UnsupportedError(
                f"{self.pixels} needs {lacking[0]} too, which the processor returns"
            )
        if "image_sizes" in inputs:
            check_numbers("image_sizes", inputs["image_sizes"], ("height", "width"))
        counts = {name: len(value) for name, value in self.given(inputs).items()}
        if len(set(counts.values())) > 1:
            raise UnsupportedError(
                f"{' and '.join(counts)} are for different numbers of images: "
                f"{', '.join(map(str, counts.values()))}; give each an entry per image"
            )

    def costs(self, inputs: Inputs) -> list[int]:
        if "image_sizes" in inputs:  # pixels (I, C, H, W) are padded to the largest
            return inputs["image_sizes"].prod(-1).tolist()
        return [1] * len(inputs[self.pixels])

    def check_model(
        self, inputs: Inputs, config: PreTrainedConfig, counts: Sequence[int]
    ) -> None:
        """Raise UnsupportedError for inputs that the towers do not take; ``counts`` are each example's placeholders."""
        tower, (channels, *size) = config.vision_config, inputs[self.pixels].shape[-3:]
        if channels != (wanted := getattr(tower, "num_channels", 3)):
            raise UnsupportedError(
                f"{self.pixels} has {channels} channels, the model's images have {wanted}{_OTHER}"
            )
        whole = tower.image_size
        whole = [whole, whole] if isinstance(whole, int) else [*whole]
        if tower.model_type in _OF_ONE_SIZE and size != whole:
            raise UnsupportedError(
                f"{self.pixels} has images of {size[0]} x {size[1]}, the model's have {whole[0]} x {whole[1]}{_OTHER}"
            )
        if tower.model_type == "pixtral" and "image_sizes" in inputs:
            side, before = (
                tower.patch_size * getattr(config, "spatial_merge_size", 1),
                0,
            )
            for image, own in enumerate(inputs["image_sizes"].tolist()):
                if own[0] > size[0] or own[1] > size[1] or min(own) < side:
                    raise UnsupportedError(
                        f"image_sizes says {own[0]} x {own[1]} of image {image}{_whose(before, counts)}, {self.pixels} "
                        f"holds {size[0]} x {size[1]} of it, and a token stands for {side} x {side}{_OTHER}"
                    )
                before += (own[0] // side) * (own[1] // side)

    def tokens(self, inputs: Inputs, config: PreTrainedConfig) -> list[int] | None:
        """Return each unit's number of text tokens; None if only the tower knows."""
        return None

    def take(self, inputs: Inputs, units: range) -> dict[str, Tensor]:
        return {
            name: value[units.start : units.stop]
            for name, value in self.given(inputs).items()
        }

    def rows(
        self, made: Tensor | Sequence[Tensor], inputs: Inputs, units: range
    ) -> list[Tensor]:
        return pieces_of(made)


def _whose(before: int, counts: Sequence[int]) -> str:
    """Name the example of an image after ``before`` tokens of other images; empty if none follows."""
    example = sum(end <= before for end in accumulate(counts))
    return f" (example {example} of the batch)" if example < len(counts) else ""


def pieces_of(made: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Split a tower's output, (images, tokens, hidden size) or a list, into tensors of rows."""
    return [
        piece.flatten(0, -2) for piece in ([made] if isinstance(made, Tensor) else made)
    ]


@dataclass(frozen=True)
class FramesOfGrid(Cut):
    """Qwen's patches (P, values) and grids (I, 3) of frames x rows x columns; attention spans one frame."""

    form: ClassVar[str] = "(patches, values)"

    @property
    def grid(self) -> str:
        return self.names[1]

    def check(self, inputs: Inputs) -> None:
        """Raise UnsupportedError if the grids are missing, or their products do not add up to the number of patches."""
        if self.grid not in inputs:
            raise UnsupportedError(
                f"{self.pixels} needs {self.grid} too, which the processor returns"
            )
        if inputs[self.pixels].ndim != 2:
            raise UnsupportedError(
                f"{self.pixels} must be {self.form}, got {tuple(inputs[self.pixels].shape)}"
            )
        patches, grids = len(inputs[self.pixels]), inputs[self.grid].prod(-1).tolist()
        if patches != sum(grids):
            raise UnsupportedError(
                f"{self.pixels} holds {patches} patches, {self.grid} says {sum(grids)} ({grids}){_OTHER}"
            )

    def costs(self, inputs: Inputs) -> list[int]:
        return [
            rows * columns
            for frames, rows, columns in inputs[self.grid].tolist()
            for _ in range(frames)
        ]

    def check_model(
        self, inputs: Inputs, config: PreTrainedConfig, counts: Sequence[int]
    ) -> None:
        """Raise UnsupportedError if patches have another size, or blocks do not divide an image's grid."""
        tower, values = config.vision_config, inputs[self.pixels].shape[-1]
        side = tower.spatial_merge_size
        wanted = (
            getattr(tower, "in_channels", 3)
            * tower.temporal_patch_size
            * tower.patch_size**2
        )
        if values != wanted:
            raise UnsupportedError(
                f"{self.pixels} has patches of {values} values, the model's have {wanted}{_OTHER}"
            )
        before = 0
        for image, (frames, rows, columns) in enumerate(inputs[self.grid].tolist()):
            if rows % side or columns % side:
                raise UnsupportedError(
                    f"{self.grid} of image {image}{_whose(before, counts)} has {rows} x {columns} patches, which "
                    f"blocks of {side} x {side} do not divide{_OTHER}"
                )
            before += frames * rows * columns // side**2

    def tokens(self, inputs: Inputs, config: PreTrainedConfig) -> list[int] | None:
        side = config.vision_config.spatial_merge_size
        return [patches // side**2 for patches in self.costs(inputs)]

    def take(self, inputs: Inputs, units: range) -> dict[str, Tensor]:
        """Return the patches of frames ``units``, and grids with only these frames."""
        costs, kept = self.costs(inputs), list[list[int]]()
        first = 0  # index of the grid's first frame among all frames
        for frames, rows, columns in inputs[self.grid].tolist():
            inside = min(units.stop, first + frames) - max(units.start, first)
            if inside > 0:
                kept.append([inside, rows, columns])
            first += frames
        start, stop = sum(costs[: units.start]), sum(costs[: units.stop])
        return {
            self.pixels: inputs[self.pixels][start:stop],
            self.grid: inputs[self.grid].new_tensor(kept),
        }


@dataclass(frozen=True)
class ImagesOfExamples(Cut):
    """Idefics' pixels (B, I, C, H, W), zero images as padding, and their mask (B, I, H, W)."""

    def check(self, inputs: Inputs) -> None:
        shapes = {
            name: tuple(value.shape[:2]) for name, value in self.given(inputs).items()
        }
        if inputs[self.pixels].ndim != 5 or len(set(shapes.values())) > 1:
            raise UnsupportedError(
                f"{self.pixels} must be (examples, images, channels, height, width), got {shapes}"
            )

    def costs(self, inputs: Inputs) -> list[int]:
        return [1] * len(self._real(inputs))

    def take(self, inputs: Inputs, units: range) -> dict[str, Tensor]:
        real = self._real(inputs)[units.start : units.stop]
        return {
            name: value.flatten(0, 1)[real][None]
            for name, value in self.given(inputs).items()
        }

    def _real(self, inputs: Inputs) -> Tensor:
        return inputs[self.pixels].flatten(0, 1).flatten(1).any(-1).nonzero()[:, 0]


@dataclass(frozen=True)
class ImagesOfTiles(Cut):
    """LLaVA-OneVision's tiles (I, most tiles, C, H, W), sizes (I, 2), counts: only a single one is tiled."""

    def check(self, inputs: Inputs) -> None:
        """Raise UnsupportedError for pixels of another form, missing sizes, or counts that do not fit."""
        pixels = inputs[self.pixels]
        sizes = inputs.get("image_sizes")
        if pixels.ndim != 5 or sizes is None or len(sizes) != len(pixels):
            raise UnsupportedError(
                f"{self.pixels} must be (images, tiles, channels, height, width) with image_sizes (images, 2), "
                f"got {tuple(pixels.shape)} and {None if sizes is None else tuple(sizes.shape)}"
            )
        check_numbers("image_sizes", sizes, ("height", "width"))
        if sum(self._groups(inputs)) != len(pixels):
            raise UnsupportedError(
                f"batch_num_images says {sum(self._groups(inputs))} images, {self.pixels} holds {len(pixels)}{_OTHER}"
            )

    def _groups(self, inputs: Inputs) -> list[int]:
        if "batch_num_images" not in inputs:
            return [1] * len(inputs[self.pixels])
        return [count for count in inputs["batch_num_images"].tolist() if count]

    def check_model(
        self, inputs: Inputs, config: PreTrainedConfig, counts: Sequence[int]
    ) -> None:
        """Raise UnsupportedError if the only image of a group has more tiles than its pixels hold."""
        super().check_model(inputs, config, counts)
        tiles, images = inputs[self.pixels].shape[1], self._groups(inputs)
        is_only = [count == 1 for count in images for _ in range(count)]
        for image, size in enumerate(inputs["image_sizes"].tolist()):
            if not is_only[image]:
                continue
            wanted = image_size_to_num_patches(
                size, config.image_grid_pinpoints, config.vision_config.image_size
            )
            if wanted > tiles:
                # An image's example is known only if each example with images has one group.
                with_images = [min(number, 1) for number in counts]
                unit = sum(end <= image for end in accumulate(images))
                whose = (
                    _whose(unit, with_images) if sum(with_images) == len(images) else ""
                )
                raise UnsupportedError(
                    f"image_sizes says {size[0]} x {size[1]} of image {image}{whose}, which makes {wanted} tiles, "
                    f"{self.pixels} holds {tiles}{_OTHER}"
                )

    def costs(self, inputs: Inputs) -> list[int]:
        return [
            inputs[self.pixels].shape[1] if count == 1 else count
            for count in self._groups(inputs)
        ]

    def take(self, inputs: Inputs, units: range) -> dict[str, Tensor]:
        groups = self._groups(inputs)
        images = slice(sum(groups[: units.start]), sum(groups[: units.stop]))
        kept = torch.tensor(groups[units.start : units.stop])
        return {name: inputs[name][images] for name in (self.pixels, "image_sizes")} | {
            "batch_num_images": kept
        }


@dataclass(frozen=True)
class FramesOfVideos(Cut):
    """LLaVA-OneVision's videos (V, F, C, H, W), each followed by a learned line break."""

    form: ClassVar[str] = "(videos, frames, channels, height, width)"

    def costs(self, inputs: Inputs) -> list[int]:
        return [1] * (inputs[self.pixels].shape[0] * inputs[self.pixels].shape[1])

    def take(self, inputs: Inputs, units: range) -> dict[str, Tensor]:
        return {
            self.pixels: inputs[self.pixels].flatten(0, 1)[
                units.start : units.stop, None
            ]
        }

    def rows(
        self, made: Tensor | Sequence[Tensor], inputs: Inputs, units: range
    ) -> list[Tensor]:
        frames = inputs[self.pixels].shape[1]
        # Each frame was encoded as a video by itself; only the last one keeps the break after it.
        return [
            row if (unit + 1) % frames == 0 else row[:-1]
            for unit, row in zip(units, made, strict=True)
        ]


@dataclass(frozen=True)
class WindowsOfSound(Cut):
    """Whisper's spectra of equally long windows (W, bins, steps), encoded separately."""

    form: ClassVar[str] = "(windows, bins, steps)"

    def check_model(
        self, inputs: Inputs, config: PreTrainedConfig, counts: Sequence[int]
    ) -> None:
        steps, whole = (
            inputs[self.pixels].shape[-1],
            2 * config.audio_config.max_source_positions,
        )
        if steps != whole:
            raise UnsupportedError(
                f"{self.pixels} has windows of {steps} steps, the model's have {whole}{_OTHER}"
            )


@dataclass(frozen=True)
class PartsOfSound(WindowsOfSound):
    """Sound windows with a mask (W, steps) of real steps, the only ones with embeddings."""

    def check(self, inputs: Inputs) -> None:
        pixels, name = inputs[self.pixels], self.names[1]
        mask = inputs.get(name)
        if (
            mask is None
            or pixels.ndim != 3
            or mask.shape != (len(pixels), pixels.shape[-1])
        ):
            raise UnsupportedError(
                f"{self.pixels} must be (windows, bins, steps) with {name} (windows, steps), got "
                f"{tuple(pixels.shape)} and {None if mask is None else tuple(mask.shape)}"
            )

    def tokens(self, inputs: Inputs, config: PreTrainedConfig) -> list[int] | None:
        halved = (
            inputs[self.names[1]].sum(-1) - 1
        ) // 2 + 1  # halved by a convolution, then by pooling
        return ((halved - 2) // 2 + 1).tolist()
