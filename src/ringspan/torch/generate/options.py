"""Arguments of ``generate``: agreed on by the ring's ranks, and checked for what a ring can honour."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig, MaxTimeCriteria
from transformers.generation.utils import GenerationMixin

from ringspan.core.arguments import PREFILL_TOKENS
from ringspan.core.errors import UnsupportedError
from ringspan.torch.data.media.inputs import MEDIA, Media, media_of
from ringspan.torch.data.padding import marked_tokens
from ringspan.torch.engine.transport.digest import described
from ringspan.torch.generate.agreed import AgreedCriteria
from ringspan.torch.generate.cache.cache import RingCache, check_cache
from ringspan.torch.generate.cache.identity import reader_of
from ringspan.torch.generate.positions import whole_positions
from ringspan.torch.generate.weights import check_weights
from ringspan.torch.mechanisms.media.checks import check_media
from ringspan.torch.mechanisms.media.kinds import has_grid_positions
from ringspan.torch.model.config_changes import check_configs
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.consistency.fixed import check_fixed
from ringspan.torch.model.consistency.forward import check_entries
from ringspan.torch.model.layers.cache_names import (
    OF_GENERATE,
    OURS,
    cache_name,
    name_ours,
)
from ringspan.torch.model.layers.decoder import cached_kinds, head_counts, head_sizes
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.positions import check_text
from ringspan.torch.model.layers.view import RingModel, decoder_on_ring

# Types of arguments that ranks compare as text.
_PLAIN: Final = (
    bool,
    int,
    float,
    str,
    list,
    tuple,
    dict,
)


def agreed_options(
    model: Any,
    plain: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weights: str,
) -> dict[str, Any]:
    """Return the arguments for transformers' ``generate``; PeerMismatch, or a rank's own error, on every rank."""
    with meeting(model.ring_mesh, "generate") as facts:
        if not issubclass(type(model), GenerationMixin):
            raise UnsupportedError(
                f"{class_name(model)} does not generate: its class must be a GenerationMixin"
            )
        bound = inspect.signature(plain).bind(*args, **kwargs).arguments
        arguments = {**bound.pop("kwargs", {}), **bound}
        name_ours(arguments)
        check_weights(weights)
        if not model.ring_is_generating:
            check_fixed(model)
        check_configs(model.ring_configs)
        _complete(model, arguments)
        config = arguments.get("generation_config") or model.generation_config
        settings = {**config.to_dict(), "_from_model_config": None, **arguments}
        texts = {
            name: _text(value)
            for name, value in sorted(settings.items())
            if isinstance(value, _PLAIN)
        }
        tensors = {
            name: described(value)
            for name, value in arguments.items()
            if isinstance(value, Tensor)
        }
        _refuse_options(model, config, arguments)
        _keep_images(model, arguments)
        _check_length(model, config, arguments)
        if arguments.get("past_key_values") is None and arguments.get(
            "use_cache", config.use_cache is not False
        ):
            arguments["past_key_values"] = model.new_cache()
        if (cache := arguments.get("past_key_values")) is not None:
            cache.read_by(reader_of(model))
        facts.alike, facts.alike_in_ring = (
            {"model": model.ring_number, "weights": weights},
            {**texts, **tensors},
        )
    config = arguments.get("generation_config") or model.generation_config
    # Replicas gather no weights from each other, so one may end before the others.
    arguments.setdefault("synced_gpus", False)
    _agree_on_the_end(model, config, arguments)
    if not model.ring_is_generating:
        _continue_cache(model, config, arguments)
    if OURS in arguments:
        # The installed transformers, and Mamba's classes, may expect the cache under another name.
        cache = arguments[OF_GENERATE] = arguments.pop(OURS)
        if OF_GENERATE == OURS and cache_name(decoder_on_ring(model)) == "cache_params":
            arguments["cache_params"] = cache
    return arguments


def _agree_on_the_end(
    model: RingModel, config: GenerationConfig, arguments: dict[str, Any]
) -> None:
    """Have the ranks end generation together: their clocks and criteria of the user's may differ."""
    if (seconds := _asked(config, arguments, "max_time")) is not None:
        clock = MaxTimeCriteria(float(seconds))
        criteria = arguments.get("stopping_criteria") or ()
        arguments["max_time"] = None
        arguments["stopping_criteria"] = [*criteria, clock]
        if config.max_time is not None:
            without = {**config.to_dict(), "max_time": None}
            arguments["generation_config"] = GenerationConfig(**without)
    if arguments.get("stopping_criteria"):
        arguments["stopping_criteria"] = AgreedCriteria.of(
            arguments["stopping_criteria"], model.ring_mesh
        )


def _continue_cache(
    model: Any, config: GenerationConfig, arguments: dict[str, Any]
) -> None:
    """Make room in a call's cache for its tokens, and give positions that count the cached images."""
    if (cache := arguments.get("past_key_values")) is None:
        return
    # An earlier call may have failed while it was recording.
    cache.records_past = False
    inputs: Any = arguments.get("inputs", arguments.get("input_ids"))
    new = _num_new_tokens(config, arguments, inputs.shape[1])
    # Generation may end before ``new`` tokens, so no more than a chunk is reserved for them.
    cache.reserve(max(cache.shares.length, inputs.shape[1]) + min(new, PREFILL_TOKENS))
    is_placed = arguments.get("position_ids") is not None
    if not cache.shares.length or not has_grid_positions(model) or is_placed:
        return
    given = (arguments.get(name) for name in MEDIA)
    media = next((each for each in given if isinstance(each, Media)), None)
    mask = arguments.get("attention_mask")
    arguments["position_ids"] = whole_positions(model, cache, inputs, mask, media)


def _complete(model: RingModel, arguments: dict[str, Any]) -> None:
    """Fill in transformers' defaults, and turn use_cache on for a given cache; raise if the call turns it off."""
    given, has_cache = (
        arguments.get("generation_config"),
        arguments.get(OURS) is not None,
    )
    if (
        has_cache
        and arguments.get("use_cache", getattr(given, "use_cache", None)) is False
    ):
        raise UnsupportedError(
            "use_cache=False with past_key_values, which generate would add to; leave one out"
        )
    if given is not None:
        arguments["generation_config"] = config = copy.deepcopy(given)
        config.use_cache = True if has_cache else config.use_cache
        config.update(
            **model.generation_config.to_dict(),
            defaults_only=True,
            allow_custom_entries=True,
        )
    elif has_cache:
        arguments["use_cache"] = True


def _asked(config: GenerationConfig, arguments: dict[str, Any], name: str) -> Any:
    return arguments[name] if name in arguments else getattr(config, name, None)


# Options of ``generate`` that a ring does not honour, with remedies.
_UNHONOURED: Final = {
    "cache_implementation": "leave it out, the cache is split over the ring",
    "output_attentions": "leave it out",
    "output_hidden_states": "leave it out",
}


def _refuse_options(
    model: RingModel, config: GenerationConfig, arguments: dict[str, Any]
) -> None:
    """Raise UnsupportedError for arguments of ``generate`` that a ring does not honour."""
    cache = arguments.get("past_key_values")
    check_cache(cache)
    if cache is not None and cache.shares.ranks != model.ring_axis.size():
        raise UnsupportedError(
            f"the cache is for a ring of {cache.shares.ranks}; use model.new_cache()"
        )
    for name, remedy in _UNHONOURED.items():
        if value := _asked(config, arguments, name):
            raise UnsupportedError(
                f"{name}={value!r} is not supported on a ring; {remedy}"
            )
    if layers := _asked(config, arguments, "assistant_early_exit"):
        raise UnsupportedError(
            f"assistant_early_exit={layers} is not supported on a ring, where no layer is left out; give an "
            "assistant_model, or prompt_lookup_num_tokens"
        )
    _refuse_assistants(model, config, arguments, cache)
    for name in ("inputs_embeds", "custom_generate", "negative_prompt_ids"):
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"generate with {name} is not supported on a ring; give input_ids alone"
            )
    inputs = _prompt_of(arguments)
    check_entries("input_ids", inputs, model.ring_vocabularies[0])
    mask = arguments.get("attention_mask")
    if mask is not None:
        marked_tokens(mask)
    if cache is not None and not model.ring_is_generating:
        _check_continues(cache, inputs, mask)
        if cache.shares.length and has_grid_positions(model) and mask is None:
            _check_padding(config, arguments, inputs)


def _refuse_assistants(
    model: RingModel,
    config: GenerationConfig,
    arguments: dict[str, Any],
    cache: RingCache | None,
) -> None:
    """Raise UnsupportedError for tokens that are guessed and taken back, if a ring cannot take them back."""
    held = 0 if cache is None or model.ring_is_generating else cache.shares.length
    if model.ring_stateful:
        why = f"with {class_name(model)}, from whose states no token is taken back"
    elif held:
        why = f"over a cache that holds {held} tokens, all of which transformers would read again"
    else:
        return
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if _asked(config, arguments, name):
            raise UnsupportedError(f"{name} is not supported {why}; leave it out")


def _prompt_of(arguments: dict[str, Any]) -> Tensor:
    inputs = arguments.get("inputs", arguments.get("input_ids"))
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.is_floating_point():
        raise UnsupportedError(
            "generate needs input_ids, token ids of shape (batch, tokens)"
        )
    if not inputs.numel():
        raise UnsupportedError(
            f"generate needs a prompt of at least one token, got the shape {tuple(inputs.shape)}"
        )
    return inputs


def _check_length(
    model: RingModel, config: GenerationConfig, arguments: dict[str, Any]
) -> None:
    """Raise for a text beyond what the model's positions reach, or say once that it is beyond its training."""
    inputs, mask = _prompt_of(arguments), arguments.get("attention_mask")
    prompt = inputs.shape[1] if mask is None else int(mask.sum(-1).max())
    new = _num_new_tokens(config, arguments, inputs.shape[1])
    check_text(model, prompt, new, says=model.ring_mesh.get_rank() == 0)


def _keep_images(model: RingModel, arguments: dict[str, Any]) -> None:
    """Replace pixels by uncached tokens' images: transformers would repeat pixels row by row for beams."""
    # A call inside of generate gets arguments whose pixels the outer call has replaced.
    if model.ring_media is None or model.ring_is_generating:
        return
    if any(isinstance(arguments.get(name), Media) for name in MEDIA):
        return
    inputs = _prompt_of(arguments)
    cache, mask = arguments.get("past_key_values"), arguments.get("attention_mask")
    count = (inputs if mask is None else mask).shape[1] - (
        0 if cache is None else cache.shares.length
    )
    new = inputs[:, -count:]
    given = {name: arguments[name] for name in MEDIA if arguments.get(name) is not None}
    given |= {
        name: given[name][:, -new.shape[1] :]
        for name in given
        if name.endswith("type_ids")
    }
    if mask is not None:
        given["attention_mask"] = mask[:, -new.shape[1] :]
    media = media_of({"input_ids": new, **given})
    check_media(model, media, new, None)
    for modality in model.ring_media.modalities:
        if modality.cut.pixels in given:
            arguments[modality.cut.pixels] = media


def _num_new_tokens(
    config: GenerationConfig, arguments: dict[str, Any], prompt: int
) -> int:
    if (new := _asked(config, arguments, "max_new_tokens")) is None:
        new = (_asked(config, arguments, "max_length") or 0) - prompt
    return max(int(new), 1)


def _check_continues(cache: RingCache, ids: Tensor, mask: Tensor | None) -> None:
    """Raise UnsupportedError for a text that does not continue the cache; transformers would not notice."""
    # A mask longer than the text covers the cached tokens as well: the text is only the continuation.
    length = cache.shares.length
    if not length:
        return
    if len(cache.ids) % len(ids):
        raise UnsupportedError(
            f"the cache holds {len(cache.ids)} sequences, input_ids {len(ids)}; give as many"
        )
    if mask is not None and mask.shape[-1] != ids.shape[1]:
        if mask.shape[-1] <= length:
            raise UnsupportedError(
                f"the cache holds {length} tokens and attention_mask is for {mask.shape[-1]}; give one for the tokens "
                "of the cache and the new ones"
            )
        return
    if ids.shape[1] <= length:
        raise UnsupportedError(
            f"the cache holds {length} tokens and input_ids are {ids.shape[1]}; give the whole text, the tokens of the "
            "cache and at least one more"
        )
    begins = (
        ids[:, :length]
        .cpu()
        .repeat_interleave(max(1, len(cache.ids) // len(ids)), dim=0)
    )
    if begins.shape == cache.ids.shape and not torch.equal(
        begins.to(cache.ids.dtype), cache.ids
    ):
        first = int((begins != cache.ids).any(0).nonzero()[0])
        raise UnsupportedError(
            f"input_ids differ from what the cache holds, from token {first} on; give what it holds and more, "
            "or use model.new_cache()"
        )


def _check_padding(
    config: GenerationConfig, arguments: dict[str, Any], ids: Tensor
) -> None:
    """Raise UnsupportedError for a text without a mask in which transformers would find padding."""
    padding, ends = (
        _asked(config, arguments, f"{name}_token_id") for name in ("pad", "eos")
    )
    ends = ends if isinstance(ends, list) else [ends]
    if (
        isinstance(padding, int)
        and padding not in ends
        and bool((ids == padding).any())
    ):
        raise UnsupportedError(
            f"input_ids hold the token that pads, pad_token_id={padding}, and no attention_mask came with them; give it"
        )


def cache_bytes(model: RingModel, arguments: dict[str, Any]) -> int:
    """Return the bytes of the cache per rank at the end of a call."""
    inputs: Any = arguments.get("inputs", arguments.get("input_ids"))
    settings = arguments.get("generation_config") or model.generation_config
    longest = inputs.shape[1] + _num_new_tokens(settings, arguments, inputs.shape[1])
    rows = len(inputs) * max(_asked(settings, arguments, "num_beams") or 1, 1)
    numbers = _cached_numbers(model, longest)
    return int(rows * numbers * model.dtype.itemsize) // model.ring_axis.size()


def _cached_numbers(model: RingModel, length: int) -> float:
    """Count the numbers cached for a sequence: keys and values, or latents, that are still seen, and mechanisms'."""
    decoder: Any = decoder_on_ring(model)
    config = decoder.config
    each = [
        2 * heads * size
        for (_, heads), size in zip(
            head_counts(config), head_sizes(config), strict=True
        )
    ]
    for module in (
        module for module in decoder.modules() if hasattr(module, "expand_kv")
    ):
        each[module.layer_idx] = module.kv_lora_rank + module.qk_rope_head_dim
    kinds = zip(cached_kinds(config) if each else (), each, strict=True)
    keys = sum(
        numbers * min(length, kind.reach or length) for kind, numbers in kinds if kind
    )
    return keys + length * sum(
        each.cached_numbers(decoder) for each in model.ring_mechanisms
    )


def _text(value: Any) -> str:
    """Return a value as text that is equal on all ranks: objects printed with their address show only their classes."""
    if not isinstance(value, str) and " at 0x" in str(value):
        return str([type(each).__name__ for each in value])
    return str(value)
