"""Forward pass over a ring's cache: tokens (B, n) in, last logits (B, n, V) out, on every rank."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ringspan.core.arguments import is_split
from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import CAUSAL, Blocks, LayerMask
from ringspan.core.geometry.layout import CustomLayout
from ringspan.core.geometry.mask import Mask, Region
from ringspan.core.geometry.shares import Runs
from ringspan.torch.data.media.inputs import MEDIA, TOKEN_TYPES, Media, media_of
from ringspan.torch.data.media.kind import Kind
from ringspan.torch.data.padding import marked_tokens
from ringspan.torch.engine.attention.cached import Reach, Turn
from ringspan.torch.engine.recurrence.current import Before, SequencePass, passing
from ringspan.torch.engine.transport.digest import described
from ringspan.torch.generate.cache.cache import RingCache, check_cache
from ringspan.torch.generate.cache.identity import reader_of
from ringspan.torch.generate.positions import new_positions, new_shifts
from ringspan.torch.mechanisms.media.checks import check_media
from ringspan.torch.mechanisms.media.kinds import has_grid_positions
from ringspan.torch.mechanisms.media.towers import PromptImages
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.consistency.forward import check_entries
from ringspan.torch.model.forward_arguments import check_arguments
from ringspan.torch.model.layers.blockwise.head import head_of
from ringspan.torch.model.layers.cache_names import (
    OF_GENERATE,
    OURS,
    cache_name,
    name_ours,
)
from ringspan.torch.model.layers.decoder import (
    finished_logits,
    text_config,
)
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.numbering import (
    counts_real_tokens,
    first_position,
    told,
)
from ringspan.torch.model.layers.positions import beyond_table, rotates
from ringspan.torch.model.layers.rope import set_global_length
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring

# Arguments that transformers' ``generate`` passes on to each forward pass, and no model uses.
_OF_GENERATE: Final = "tokenizer", "assistant_tokenizer"


class CachePass(NamedTuple):
    """Arguments of a pass over a cache; the fields but ``media`` have transformers' names."""

    input_ids: Any = None
    """New tokens (B, n)."""
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    past_key_values: RingCache | None = None
    use_cache: bool | None = None
    logits_to_keep: int | None = 0
    media: Media | None = None


def agreed_pass(
    model: RingModel,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CachePass:
    """Return the arguments of a pass over a cache; PeerMismatch, or a rank's own error, on every rank."""
    with meeting(
        model.ring_mesh, "a forward pass over a cache", between_replicas=False
    ) as met:
        given = kwargs
        if args:
            names = [
                name for name in inspect.signature(forward).parameters if name != "self"
            ]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
        name_ours(given)
        asked = CachePass(
            **{
                name: given.pop(name)
                for name in CachePass._fields[:-1]
                if name in given
            }
        )
        asked = asked._replace(media=_media(model, asked, given))
        apart = (
            ("return_dict", *_OF_GENERATE)
            if model.ring_is_generating
            else ("return_dict",)
        )
        check_arguments(
            class_name(model),
            {name: value for name, value in given.items() if name not in apart},
        )
        if given.get("return_dict") is False:
            raise UnsupportedError(
                "return_dict=False is not supported on a ring; it must be True"
            )
        _check_pass(model, asked)
        facts: dict[str, Any] = {
            name: described(value) if isinstance(value, Tensor) else str(value)
            for name, value in asked._asdict().items()
            if name != "media"
        }
        # Ranks generate from one prompt, so tokens that differ were sampled differently: the error should say so.
        if model.ring_is_generating:
            facts["chosen tokens"] = facts.pop("input_ids")
        facts["images"] = None if asked.media is None else asked.media.digest
        cache = asked.past_key_values
        facts["past_key_values"] = (
            None
            if cache is None
            else f"{cache.shares.length} tokens in {cache.dtype or 'its own dtype'}"
        )
        facts |= {
            "model": model.ring_number,
            "mode": "training" if model.training else "evaluation",
        }
        if cache is not None:
            cache.read_by(reader_of(model))
        met.alike_in_ring = facts
    return asked


def _media(model: RingModel, asked: CachePass, given: dict[str, Any]) -> Media | None:
    """Take images and sound out of a pass's arguments and return the new tokens', checked; None if there are none.

    While a model generates, the prompt's have been prepared before and come as ``Media``. Otherwise ``given`` has pixel
    values and token types; token types may cover the cached text too, and are cut to the new tokens.
    """
    if model.ring_media is None:
        return None
    inputs = {
        name: value for name in MEDIA if (value := given.pop(name, None)) is not None
    }
    ids, mask = asked.input_ids, asked.attention_mask
    if (
        kept := next(
            (value for value in inputs.values() if isinstance(value, Media)), None
        )
    ) is not None:
        return _of_prompt(kept, ids)
    kind: Kind = model.ring_media
    wanted = [each.cut.pixels for each in kind.modalities] + (
        [kind.blocks] if kind.is_prefix else []
    )
    if not isinstance(ids, Tensor) or not any(name in inputs for name in wanted):
        return None
    for name in set(TOKEN_TYPES) & set(inputs):
        inputs[name] = inputs[name][:, -ids.shape[1] :]
    real = {} if mask is None else {"attention_mask": mask[:, -ids.shape[1] :]}
    media = media_of({"input_ids": ids, **real, **inputs})
    check_media(model, media, ids, None)
    return media


def _of_prompt(media: Media, ids: object) -> Media:
    """Return a prompt's images from rows repeated per beam; raise UnsupportedError for other tokens."""
    rows, count = media.tokens.shape
    if isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) % rows == 0:
        expected = media.tokens.repeat_interleave(len(ids) // rows, 0)
        if ids.shape[1] >= count and bool((ids[:, :count].cpu() == expected).all()):
            return media
    raise UnsupportedError(
        "a prompt with images is read as a whole; leave prefill_chunk_size out, a ring has its own"
    )


def _check_pass(model: RingModel, asked: CachePass) -> None:
    """Raise UnsupportedError for arguments of a pass over a cache that a ring does not honour."""
    ids, mask, positions, cache, use_cache, keep, _ = asked
    if torch.is_grad_enabled() and not model.ring_is_generating:
        raise UnsupportedError(
            "a pass over a cache is not differentiated; call it under torch.no_grad()"
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
        raise UnsupportedError(
            "input_ids of shape (batch, tokens), at least one, are needed over a cache"
        )
    check_entries("input_ids", ids, model.ring_vocabularies[0])
    check_cache(cache)
    if cache is not None and use_cache is False:
        raise UnsupportedError(
            "use_cache=False with past_key_values, which the pass would add to; leave one out"
        )
    if not isinstance(keep if keep is not None else 0, int):
        raise UnsupportedError(
            f"logits_to_keep must be a number of last tokens, got a {type(keep).__name__}"
        )
    length = ids.shape[1] + (0 if cache is None else cache.shares.length)
    if mask is not None:
        _check_mask(model, mask, (len(ids), length))
    if positions is not None and positions.shape[-1] != ids.shape[1]:
        raise UnsupportedError(
            f"position_ids are {positions.shape[-1]} for {ids.shape[1]} tokens; give one each"
        )
    if cache is not None and (rows := cache.num_sequences) not in (None, len(ids)):
        raise UnsupportedError(
            f"the cache holds {rows} sequences, input_ids {len(ids)}; give as many"
        )
    last = length if positions is None else int(positions.max()) + 1
    if error := beyond_table(model, decoder_on_ring(model), last):
        raise error


def _check_mask(model: RingModel, mask: Tensor, shape: tuple[int, int]) -> None:
    """Raise UnsupportedError for a mask of other tokens, or of padding that a mechanism does not take."""
    if tuple(mask.shape) != shape:
        raise UnsupportedError(
            f"attention_mask has the shape {tuple(mask.shape)}; for {shape[0]} x {shape[1]} tokens, those in the cache "
            f"included, it must be {shape}"
        )
    # ``generate`` checks the mask once for all of its passes.
    if not model.ring_is_generating:
        marked_tokens(mask)
    for each in model.ring_mechanisms:
        each.refuse_cached(model, mask)


def over_cache(model: Any, asked: CachePass) -> CausalLMOutputWithPast:
    """Run tokens (B, n) over a cache and extend it: logits of the last ``logits_to_keep``, all when 0."""
    input_ids, attention_mask, position_ids, cache, use_cache, logits_to_keep, media = (
        asked
    )
    # A logits processor may call the model without a cache while it generates.
    if cache is None:
        cache = model.new_cache()
        cache.read_by(reader_of(model))
    device = next(iter(model.get_input_embeddings().parameters())).device
    ids, count, before = input_ids.to(device), input_ids.shape[1], cache.shares.length
    real = None
    if attention_mask is not None and not bool(attention_mask.all()):
        real = real_runs(attention_mask)
    if position_ids is None:
        position_ids = _positions(model, cache, ids, attention_mask, media)
    # With images, positions have a time, row and column too: (4, B, n).
    position_ids = position_ids.to(device).expand(
        *position_ids.shape[:-2], len(ids), -1
    )
    shifts = (
        new_shifts(cache, position_ids, attention_mask)
        if has_grid_positions(model)
        else None
    )
    set_global_length(decoder_on_ring(model), int(position_ids.max()) + 1)
    keep = min(logits_to_keep or count, count)
    chunk = model.ring_prefill_tokens * cache.shares.ranks
    cache.reserve(before + count)
    last: list[Tensor] = []
    images = None if media is None else PromptImages(model, media, len(ids), count)
    for part in _parts(count, chunk, None if images is None else images.blocks):
        wanted = max(0, part.stop - max(part.start, count - keep))
        hidden = _turn(model, cache, ids, position_ids, part, real, wanted, images)
        last.append(hidden)
        if model.ring_on_read is not None:
            model.ring_on_read(cache.shares.length)
    cache.keep_ids(input_ids, shifts)
    options = model.ring_loss
    logits = finished_logits(
        head_of(model)(torch.cat(last, 1)), options.logit_scale, options.softcap
    ).contiguous()
    # Sampling needs the same bits on every rank, and different processors may round differently.
    if cache.shares.ranks > 1:
        dist.broadcast(logits, group_src=0, group=model.ring_axis.get_group())
    found: dict[str, Any] = {
        "logits": logits,
        OF_GENERATE: None if use_cache is False else cache,
    }
    return CausalLMOutputWithPast(**found)


def _positions(
    model: RingModel,
    cache: RingCache,
    ids: Tensor,
    mask: Tensor | None,
    media: Media | None,
) -> Tensor:
    """Return the positions of new tokens (B, n) that no caller has numbered, as transformers' forward does."""
    decoder = decoder_on_ring(model)
    # Its models with learned positions number padding too, which ``generate`` skips.
    skips = (
        rotates(text_config(model.config))
        or has_grid_positions(model)
        or counts_real_tokens(decoder)
    )
    seen = mask if skips else None
    rows, count = ids.shape
    return new_positions(model, cache, rows, count, seen, media) + first_position(
        decoder
    )


def _parts(count: int, chunk: int, blocks: Sequence[Blocks] | None) -> Iterator[slice]:
    first = 0
    while first < count:
        stop = min(first + chunk, count)
        while ends := [
            end for row in blocks or () for start, end in row if start < stop < end
        ]:
            stop = max(ends)
        yield slice(first, stop)
        first = stop


def _turn(
    model: RingModel, cache: RingCache, ids: Tensor, positions: Tensor, part: slice, real: tuple[Runs, ...] | None,
    wanted: int, images: PromptImages | None,
) -> Tensor:  # fmt: skip
    """Run one chunk of new tokens over the cache; return its last ``wanted`` hidden states (B, wanted, C) on all ranks.

    ``part``: the chunk's tokens among the new ones. ``real``: each row's runs of real tokens, None without padding. A
    long chunk is split over the ranks, and the wanted states are summed from their owners. A few tokens are computed on
    every rank, and each keeps the keys of its share.
    """
    ring, decoder = model.ring_axis, decoder_on_ring(model)
    start, count, columns = (
        cache.shares.length,
        part.stop - part.start,
        torch.arange(part.start, part.stop),
    )
    splits = is_split(count, cache.shares.ranks)
    firsts = cache.firsts
    if any(each.reads_all(model) for each in model.ring_mechanisms):
        firsts[CAUSAL] = 0
    new = cache.add(count, is_split=splits)
    reaches = {
        kind: Reach(
            cache.shares.held(first),
            layer_masks(
                kind, start, start + count, real, _blocks_in(part, start, images)
            ),
        )
        for kind, first in firsts.items()
    }
    turn = Turn(
        ring.get_group(),
        ring.get_local_rank(),
        new,
        splits,
        reaches,
        cache.records_past,
    )
    mine = columns[turn.kept] if splits else columns
    others: dict[str, Any] = {cache_name(decoder) or OURS: cache}
    if model.ring_router is not None:
        others["output_router_logits"] = False
    with turn.active(), passing(_sequences(turn) if cache.stateful else None):
        here = mine.to(ids.device)
        given = {
            "input_ids": ids[:, here],
            "position_ids": positions[..., here],
            "use_cache": True,
            **others,
        }
        with told(decoder, given) as told_all:
            out: Any = (
                decoder(**told_all) if images is None else images.read(mine, told_all)
            )
    cache.check_updated(class_name(model))
    hidden = out.last_hidden_state
    if not splits:
        return hidden[:, count - wanted :]
    whole = hidden.new_zeros((len(ids), wanted, hidden.shape[-1]))
    last = turn.kept >= count - wanted
    if wanted:
        whole[:, (turn.kept[last] - (count - wanted)).to(ids.device)] = hidden[
            :, last.to(ids.device)
        ]
        dist.all_reduce(whole, group=ring.get_group())
    return whole


def _blocks_in(
    part: slice, start: int, images: PromptImages | None
) -> list[Blocks] | None:
    if images is None or images.blocks is None:
        return None
    shift = start - part.start
    return [
        tuple(
            (first + shift, stop + shift)
            for first, stop in row
            if part.start <= first < part.stop
        )
        for row in images.blocks
    ]


def _sequences(turn: Turn) -> SequencePass:
    """Return the pass that layers with a state see, counted from the first new token."""
    runs = [
        [(span.start - turn.start, span.count) for span in held]
        for held in turn.queries.parts
    ]
    return SequencePass(
        (CustomLayout.of(runs),), turn.group if turn.is_split else None, before=Before()
    )


@contextmanager
def unchecked(model: nn.Module) -> Iterator[None]:
    """Disable activation checkpointing, because transformers' layers drop their cache under it."""
    modules = [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    for module in modules:
        module.gradient_checkpointing = False  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True  # pyright: ignore[reportArgumentType]


def real_runs(attention_mask: Tensor) -> tuple[Runs, ...]:
    """Return the runs (start, count) of ones of each sequence of a mask (B, S)."""
    edges = torch.nn.functional.pad(attention_mask.bool().int(), (1, 1)).diff(dim=1)
    found: list[Runs] = []
    for row in edges:
        starts, ends = ((row == sign).nonzero().flatten().tolist() for sign in (1, -1))
        found.append(
            tuple((start, end - start) for start, end in zip(starts, ends, strict=True))
        )
    return tuple(found)


def layer_masks(
    kind: LayerMask,
    start: int,
    length: int,
    real: Sequence[Runs] | None,
    blocks: Sequence[Blocks] | None,
) -> tuple[Mask, ...]:
    """Return a layer's mask over the cache for each sequence, or one if all agree.

    Tokens of a block see the block's later tokens too.
    """
    rows = len(real or blocks or (None,))
    masks: list[Mask] = []
    for runs, of_row in zip(real or [None] * rows, blocks or [()] * rows, strict=True):
        before = kind.over_cache(start, length, runs)
        both_ways = (Region(one, end, one, end, hi=-1) for one, end in of_row)
        masks.append(Mask((*before.regions, *both_ways)))
    return tuple(masks)
