"""How long a sequence a model has positions for: learned tables end, rotary ones were trained up to some length."""

import logging
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import UnsupportedError

logger = logging.getLogger(__name__)

# What transformers computes from max_position_embeddings for these changes with it: their config must stay as it is.
_LENGTH_IN_FREQUENCIES: Final = ("dynamic", "longrope")


def num_learned_positions(decoder: nn.Module) -> int | None:
    """Positions of the decoder's learned table, its shortest; None where positions are rotary, or nowhere."""
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)  # OPT leaves the first rows unused
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in (last := name.rpartition(".")[2]) or last == "wpe")
    ]
    return min(tables, default=None)


def beyond_table(model: PreTrainedModel, decoder: nn.Module, length: int) -> UnsupportedError | None:
    """The error where a sequence of ``length`` tokens has more positions than the model's learned table."""
    limit = num_learned_positions(decoder)
    if limit is None or length <= limit:
        return None
    name = type(model).__name__.removeprefix("FSDP")
    return UnsupportedError(
        f"{name} has learned positions for {limit} tokens, the sequence has {length}; give it at most {limit} a "
        "sequence, or take a model with rotary positions"
    )


def note_length(model: Any, config: PreTrainedConfig, length: int, *, says: bool) -> None:
    """Let the config of a rotary model know that it is trained on sequences of ``length`` tokens, so that it is saved
    with that; one rank ``says`` once that the model was not made for them.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = _rope_tables(config)
    # Dynamic scaling keeps the length that the model was first trained for there, whatever its factor.
    factors = [each.get("factor", 1.0) for each in rope if each.get("rope_type") == "dynamic"]
    if not isinstance(limit, int) or length <= limit * max(factors, default=1.0):
        return
    keeps = any(
        each.get("rope_type") in _LENGTH_IN_FREQUENCIES
        or (each.get("rope_type") == "yarn" and each.get("factor") is None)
        for each in rope
    )
    if says and not getattr(model, "ring_said_length", False):
        remedy = (
            "scale them (model.rope of ringspan train, config.rope_parameters of transformers); " if rope[0] else ""
        )
        then = "stays as it is, since its frequencies depend on it" if keeps else f"becomes {length}"
        logger.warning(
            "sequences of %d tokens are longer than the %d positions that this model was made for; %s"
            "its max_position_embeddings %s",
            length,
            limit,
            remedy,
            then,
        )
    model.ring_said_length = True
    if not keeps:
        config.max_position_embeddings = length


def _rope_tables(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """What the config says of rotary positions, of all layers alike or of each type of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]
