"""Checks of a batch's images before any rank computes."""

from collections.abc import Sequence

from torch import Tensor

from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.lines import one_line
from ringspan.torch.data.media.inputs import Media
from ringspan.torch.mechanisms.media.kinds import (
    Kind,
    Modality,
    blocks_of,
    grid_positions,
    is_of,
    kinds,
    placeholder,
)
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.runtime.mesh import tensor_axis


def check_media(
    model: RingModel, media: Media | None, tokens: Tensor, lengths: Tensor | None
) -> None:
    """Raise UnsupportedError, by name and example, for images or placeholders that a model cannot take."""
    # ``media`` and ``lengths`` (of documents) are the whole batch's, ``tokens`` (B, T) the local ones.
    kind: Kind | None = model.ring_media
    if kind is None:
        if media is not None:
            raise UnsupportedError(
                f"{class_name(model)} takes no {', '.join(media.inputs)} on a ring, where it trains on its text; leave "
                f"it out, or take a model of the types {', '.join(sorted(kinds()))}"
            )
        return
    if kind.is_prefix and (media is None or kind.blocks not in media.inputs):
        raise UnsupportedError(
            f"{class_name(model)} needs {kind.blocks} beside input_ids: {kind.block_type} for a prompt, whose tokens "
            "see each other both ways, and 1 for what follows; give rs.shard_batch what the processor returned"
        )
    if media is None:
        for modality in kind.modalities:
            # A placeholder of 0 cannot be told from padding.
            counts = is_of(model, modality, tokens).sum(1)
            if placeholder(model, modality) != 0 and bool(counts.any()):
                raise _lonely_tokens(model, modality, counts)
        return
    if unknown := sorted(set(media.inputs) - kind.names):
        raise UnsupportedError(
            f"{class_name(model)} takes no {', '.join(unknown)} on a ring; it takes {', '.join(sorted(kind.names))}"
        )
    has_any = any(modality.cut.pixels in media.inputs for modality in kind.modalities)
    if has_any and tensor_axis(model.ring_mesh) is not None:
        raise UnsupportedError(
            "images are not supported with tp, whose ranks would each make all embeddings; use tp=1"
        )
    if model.ring_compiled and blocks_of(kind, media, lengths) is not None:
        raise UnsupportedError(
            f"{kind.blocks} marks tokens that see each other both ways, which compiled layers do not compute; use "
            "compile=False"
        )
    if kind.is_prefix:
        _check_prefix(model, kind, media, lengths)
    for modality in kind.modalities:
        _check_modality(model, modality, media)
    if kind.has_grid_positions:
        _find_positions(model, kind, media, lengths)


def _find_positions(
    model: RingModel, kind: Kind, media: Media, lengths: Tensor | None
) -> None:
    try:
        media.found["positions"] = grid_positions(model, kind, media, lengths)
    except (RuntimeError, ValueError, IndexError, StopIteration) as error:
        raise UnsupportedError(
            f"{class_name(model)} cannot tell the positions of this text from its grids ({one_line(error)}); the "
            "processor of the model writes tokens between one image and the next, and those of each frame together"
        ) from error


def _check_prefix(
    model: RingModel, kind: Kind, media: Media, lengths: Tensor | None
) -> None:
    """Raise UnsupportedError if a prefix block does not begin its document, or exceeds the layers' window.

    Each document may have one block, whose tokens all see each other.
    """
    window = getattr(text_config(model.config), "sliding_window", None)
    for example, blocks in enumerate(blocks_of(kind, media, lengths) or ()):
        documents = 1 if lengths is None else int((lengths[example] > 0).sum())
        if len(blocks) > documents:
            raise UnsupportedError(
                f"example {example} of the batch has {len(blocks)} runs of tokens with "
                f"{kind.blocks}={kind.block_type}, which would all see each other; such tokens must begin a text"
            )
        longest = max((stop - start for start, stop in blocks), default=0)
        if window is not None and longest > window:
            raise UnsupportedError(
                f"example {example} of the batch begins with {longest} tokens that see each other, more than the "
                f"window of {window} of the model's layers, which a ring does not support"
            )


def _lonely_tokens(
    model: RingModel, modality: Modality, counts: Tensor
) -> UnsupportedError:
    return UnsupportedError(
        f"example {int(counts.nonzero()[0, 0])} of the batch has tokens for {modality.name}s (id "
        f"{placeholder(model, modality)}), and no {modality.cut.pixels} came with it; give rs.shard_batch what the "
        "processor returned"
    )


def _check_modality(model: RingModel, modality: Modality, media: Media) -> None:
    """Raise UnsupportedError if a modality's inputs and placeholder tokens do not fit each other or the model."""
    cut, name = modality.cut, modality.name
    counts = is_of(model, modality, media.tokens).sum(1)
    if cut.pixels not in media.inputs:
        if lost := [other for other in cut.names if other in media.inputs]:
            raise UnsupportedError(
                f"{lost[0]} came without {cut.pixels}; give both, or neither"
            )
        if bool(counts.any()) and placeholder(model, modality) != 0:
            raise _lonely_tokens(model, modality, counts)
        return
    if placeholder(model, modality) == 0:
        raise UnsupportedError(
            f"{modality.token_field}=0 of the config is a ring's padding token; choose another"
        )
    cut.check(media.inputs)
    units = len(cut.costs(media.inputs))
    if not units:
        raise UnsupportedError(f"{cut.pixels} holds no {name}; leave it out")
    if not bool(counts.any()):
        raise UnsupportedError(
            f"{cut.pixels} holds {name}s, and no example of the batch has a token for them (id "
            f"{placeholder(model, modality)}); let the processor make the text too"
        )
    cut.check_model(media.inputs, model.config, counts.tolist())
    tokens = cut.tokens(media.inputs, model.config)
    if tokens is not None:
        check_counts(modality, tokens, counts.tolist())


def check_counts(
    modality: Modality, made: Sequence[int], wanted: Sequence[int]
) -> None:
    """Raise UnsupportedError if units' embeddings, in order, do not match the ``wanted`` tokens."""
    if sum(made) == sum(wanted):
        return
    rest, unit = list(made), 0
    for example, number in enumerate(wanted):
        found = 0
        while unit < len(rest) and found < number:
            found += rest[unit]
            unit += 1
        if found != number:
            raise UnsupportedError(
                f"example {example} of the batch has {number} tokens for {modality.name}s, and its {modality.name}s "
                f"make {found}; the processor must be that of the model, and nothing may cut its text"
            )
    left = sum(rest[unit:])
    raise UnsupportedError(
        f"{modality.cut.pixels} makes {left} more embeddings than the {len(wanted)} examples of the batch have tokens "
        f"for {modality.name}s ({sum(wanted)}); use the processor's tokens"
    )
