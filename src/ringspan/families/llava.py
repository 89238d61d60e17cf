"""LLaVA and models of its kind: an image's embeddings take the place of its tokens, and see earlier ones alone."""

from typing import Final

from ringspan.torch.data.media import cuts
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.model.layers.family import Family

_IMAGES: Final = Modality("image", cuts.Cut(("pixel_values",)))
_SIZED: Final = Modality("image", cuts.Cut(("pixel_values", "image_sizes")))
_TILES: Final = Modality(
    "image", cuts.ImagesOfTiles(("pixel_values", "image_sizes", "batch_num_images"))
)
_OF_EXAMPLES: Final = Modality(
    "image", cuts.ImagesOfExamples(("pixel_values", "pixel_attention_mask"))
)


FAMILIES: Final = (
    Family(name="LLaVA", types=("llava",), media=Kind((_SIZED,))),
    Family(
        name="LLaVA-OneVision",
        types=("llava_onevision",),
        media=Kind(
            (
                _TILES,
                Modality("video", cuts.FramesOfVideos(("pixel_values_videos",))),
            )
        ),
    ),
    Family(
        name="Mistral 3",
        types=("mistral3",),
        media=Kind((Modality("image", cuts.Cut(_SIZED.cut.names, needs_all=True)),)),
    ),
    Family(name="InternVL", types=("internvl",), media=Kind((_IMAGES,))),
    Family(
        name="Idefics 3", types=("idefics3", "smolvlm"), media=Kind((_OF_EXAMPLES,))
    ),
)
