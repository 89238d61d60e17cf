"""Limits on a sequence's length: the end of a learned table, or the length of a rotary model's training."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import class_name, modules_in
from ringspan.torch.model.layers.numbering import counts_real_tokens
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring

logger = logging.getLogger(__name__)


def num_learned_positions(decoder: nn.Module) -> int | None:
    """Return the size of a decoder's shortest learned table; None if positions are rotary or absent."""
    if "ring_learned_positions" in vars(decoder):
        return vars(decoder)["ring_learned_positions"]
    tables = [
        module.num_embeddings
        - getattr(module, "offset", 0)  # OPT leaves the first rows unused
        for part in modules_in(decoder)
        for name, module in part._modules.items()
        if isinstance(module, nn.Embedding) and ("pos" in name or name == "wpe")
    ]
    return min(tables, default=None)


def note_learned_positions(decoder: nn.Module) -> None:
    """Let every pass of a decoder know how many positions it has learned, without a walk through its modules."""
    vars(decoder)["ring_learned_positions"] = num_learned_positions(decoder)


def beyond_table(
    model: PreTrainedModel, decoder: nn.Module, length: int
) -> UnsupportedError | None:
    """Return the error if ``length`` tokens exceed the model's learned table; None if they fit."""
    limit = num_learned_positions(decoder)
    if limit is None or length <= limit:
        return None
    name = class_name(model)
    return UnsupportedError(
        f"{name} has learned positions for {limit} tokens, the sequence has {length}; give it at most {limit} a "
        "sequence, or take a model with rotary positions"
    )


def num_trained_positions(config: PreTrainedConfig) -> int | None:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    # With dynamic scaling the field is the original training length, before the factor.
    factors = [
        each.get("factor", 1.0)
        for each in _rope_tables(config)
        if each.get("rope_type") == "dynamic"
    ]
    return int(limit * max(factors, default=1.0))


def check_text(model: RingModel, prompt: int, new: int, *, says: bool) -> None:
    """Check that a model has positions for ``prompt`` and ``new`` tokens; log once, if ``says``."""
    decoder = decoder_on_ring(model)
    limit = num_learned_positions(decoder)
    if limit is not None and prompt + new > limit:
        raise UnsupportedError(
            f"{class_name(model)} has learned positions for {limit} tokens, and a prompt of {prompt} with {new} new "
            f"ones needs {prompt + new}; shorten the prompt or lower max_new_tokens"
        )
    config = text_config(model.config)
    made_for = num_trained_positions(config)
    if (
        made_for is None
        or prompt + new <= made_for
        or not says
        or getattr(model, "ring_said_text_length", False)
    ):
        return
    model.ring_said_text_length = True
    scale = (
        "; scale them (config.rope_parameters) or expect worse text"
        if _rope_tables(config)[0]
        else ""
    )
    logger.warning(
        "a prompt of %d tokens with %d new ones is longer than the %d positions that this model was made for%s",
        prompt,
        new,
        made_for,
        scale,
    )


def note_length(model: RingModel, length: int, *, says: bool) -> None:
    """Store the trained length for ``as_trained``; log once, if ``says``, that it is longer."""
    config = text_config(model.config)
    made_for = num_trained_positions(config)
    if made_for is None or length <= made_for:
        return
    limit, rope = config.max_position_embeddings, _rope_tables(config)
    keeps = rotates_by_length(config) or any(
        each.get("rope_type") == "yarn" and each.get("factor") is None for each in rope
    )
    noted = getattr(model, "ring_trained_length", None)
    if says and noted is None:
        remedy = (
            "scale them (ringspan train: model.rope; transformers: config.rope_parameters); "
            if rope[0]
            else ""
        )
        then = (
            f"stays {limit}, since its frequencies depend on it"
            if keeps
            else "is saved as the longest of them"
        )
        logger.warning(
            "sequences of %d tokens are longer than the %d positions that this model was made for; %s"
            "its max_position_embeddings %s",
            length,
            limit,
            remedy,
            then,
        )
    model.ring_trained_length = limit if keeps else max(noted or 0, length)


@contextmanager
def as_trained(model: PreTrainedModel) -> Iterator[None]:
    """Set the trained length in the config only while saving, so that no computation depends on it."""
    config, length = (
        text_config(model.config),
        getattr(model, "ring_trained_length", None),
    )
    before = getattr(config, "max_position_embeddings", None)
    if length is not None:
        config.max_position_embeddings = length
    try:
        yield
    finally:
        if length is not None:
            config.max_position_embeddings = before


def rotates_by_length(config: PreTrainedConfig) -> bool:
    """Return True if frequencies depend on the text's length, so that cached keys of a shorter text are invalid."""
    return _rope_by_length(config) is not None


def _rope_by_length(config: PreTrainedConfig) -> str | None:
    kinds = (each.get("rope_type") for each in _rope_tables(config))
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def refuse_rope_by_length(name: str, config: PreTrainedConfig, why: str) -> None:
    if rope := _rope_by_length(config):
        raise UnsupportedError(
            f"{name}: rope_type={rope!r} chooses frequencies by the length of the sequence, which {why}; use default, "
            "linear, llama3 or yarn"
        )


def rotates(config: PreTrainedConfig) -> bool:
    """Return True if positions are rotary with fixed frequencies, so that only distances matter."""
    return _counts_distances(config) and not rotates_by_length(config)


def may_begin_anywhere(model: RingModel) -> bool:
    """Return True if rows of one length may begin at any position: only distances matter, or none."""
    config, decoder = text_config(model.config), decoder_on_ring(model)
    has_none = (
        model.ring_stateful
        and num_learned_positions(decoder) is None
        and not _rope_tables(config)[0]
    )
    return has_none or _counts_distances(config) or counts_real_tokens(decoder)


def _counts_distances(config: PreTrainedConfig) -> bool:
    """Return True if attention depends on positions by the distance of two tokens only."""
    rope, family = _rope_tables(config), family_of(config)
    if not family.counts_distances or family.scales_queries(config):
        return False
    if any(each.get("llama_4_scaling_beta") for each in rope):
        return False
    return bool(rope[0]) or hasattr(config, "rotary_dim")


def _rope_tables(config: PreTrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]
