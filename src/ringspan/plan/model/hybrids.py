"""Layers with states or convolutions, counted from the modules that transformers builds of a config.

On the meta device, weights have shapes and no values: a type's own code says what a layer holds, so no size is repeated
here. T tokens, C hidden size, H heads, K key size, V value size, N state size.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.messages.lines import one_line
from ringspan.plan.model.kinds import LayerKind, Scan
from ringspan.torch.layers.decoder import decoder_of, layer_kinds, layers_of
from ringspan.torch.model.recurrent import functions_of, stateful_modules

_DELTA_CHUNK: Final = 64  # tokens, in transformers' code and flash-linear-attention's
_DELTA: Final = "torch_chunk_gated_delta_rule"
_SSD: Final = "mamba2_chunk_scan"
_SELECTIVE: Final = "mamba_selective_scan"
_LIGHTNING: Final = "lightning_attention"


def hybrid_values(values: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a ``ModelShape``'s sizes and layer kinds for a config; None if no layer has a state or a convolution.

    Raises:
        ConfigError: values of which transformers builds no model.
        UnsupportedError: a layer whose parts the planner does not know; the message names it.
    """
    kind = values["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    model = built(AutoModelForCausalLM, values, name)
    decoder = decoder_of(model)
    if not stateful_modules(decoder):
        return None
    return decoder_values(model, name)


def built(auto: Any, values: Mapping[str, Any], name: str) -> Any:
    """Build the model of a config on the meta device, by an auto class of transformers.

    Raises:
        ConfigError: transformers makes none of these values.
    """
    kind = values["model_type"]
    try:
        config = CONFIG_MAPPING[kind](**{key: _number(value) for key, value in values.items() if key != "model_type"})
        with torch.device("meta"):
            return auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # of config classes and modules of any kind
        raise ConfigError(f"{name}: transformers builds no {kind} model of its config: {one_line(error)}") from error


def decoder_values(model: Any, name: str) -> dict[str, Any]:
    """Return sizes and layer kinds of a ``ModelShape`` for a model's decoder, counted layer by layer.

    Raises:
        UnsupportedError: a layer whose parts the planner does not know; the message names it.
    """
    decoder: Any = decoder_of(model)
    config = decoder.config
    kind = config.model_type
    layers = [*layers_of(decoder).values()]
    held = [id(parameter) for layer in layers for parameter in layer.parameters()]
    if len(set(held)) < len(held):
        raise UnsupportedError(
            f"{name}: {kind} shares weights between layers, which the planner does not count: use rehearse"
        )
    windows = [kind.window for kind in layer_kinds(config)]
    kinds = [
        _kind(layer, config, window, f"{name}: layer {number} of {kind}")
        for number, (layer, window) in enumerate(zip(layers, windows, strict=True))
    ]
    heads, kv_heads, head_dim = _heads(config) if any(each.attends for each in kinds) else (1, 1, 1)
    output = model.get_output_embeddings()
    return {
        "layers": len(layers),
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": max(each.intermediate for each in kinds),
        "vocab": config.vocab_size,
        "tied": output is None or output.weight is model.get_input_embeddings().weight,
        "root": model.num_parameters() - sum(each.parameters for each in kinds),
        "kinds": tuple(kinds),
        "model_type": model.config.model_type,
    }


def _number(value: Any) -> Any:
    """Read a value of a config.json, in which transformers writes numbers that JSON lacks as objects."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and [*value] == ["__float__"] else value


def _heads(config: PreTrainedConfig) -> tuple[int, int, int]:
    heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _kind(layer: nn.Module, config: PreTrainedConfig, window: int | None, where: str) -> LayerKind:
    held = stateful_modules(layer)
    if len(held) > 1:
        raise UnsupportedError(f"{where} has states in {', '.join(held)}; the planner needs one per layer")
    attention = [(path, module) for path, module in layer.named_modules() if _attends(module, config)]
    mixers = [module for _, module in [*held.items(), *attention]]
    mixing = {id(p) for module in mixers for p in module.parameters()}
    rest = [(path, p) for path, p in layer.named_parameters() if id(p) not in mixing and p.ndim > 1]
    scan, channels, taps, mixed = None, 0, 0, 0
    for path, module in held.items():
        scan = _scan(module, f"{where}, {path}")
        convolution = next((each for each in module.modules() if isinstance(each, nn.Conv1d)), None)
        if convolution is not None:
            channels, taps = convolution.in_channels, convolution.kernel_size[0]
        rows = [each.out_features for each in module.modules() if isinstance(each, nn.Linear)]
        mixed = sum(rows) - config.hidden_size + 2 * channels
    return LayerKind(
        parameters=sum(p.numel() for p in layer.parameters()),
        matrices=sum(_used(path, p, config) for path, p in layer.named_parameters() if p.ndim > 1),
        feedforward=sum(p.numel() for _, p in rest),
        intermediate=round(sum(_used(path, p, config) for path, p in rest) / (3 * config.hidden_size)),
        attends=bool(attention),
        window=window,
        scan=scan,
        channels=channels,
        taps=taps,
        mixed=mixed,
    )


def _attends(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether a module is softmax attention over heads of one size; UnsupportedError for other kinds of keys."""
    if hasattr(module, "kv_b_proj"):
        raise UnsupportedError(
            f"{config.model_type}: {type(module).__name__} has latent keys, not counted: use rehearse"
        )
    return all(hasattr(module, f"{name}_proj") for name in "qkv") and not functions_of(module)


def _used(path: str, weight: nn.Parameter, config: PreTrainedConfig) -> int:
    """Count weights of a matrix that one token is multiplied with: only those of the experts that it is sent to."""
    if path.endswith("A_log"):  # decays, of as many numbers as a state
        return 0
    if ".experts." not in f".{path}" or weight.ndim < 3:
        return weight.numel()
    chosen: int = config.num_experts_per_tok
    return weight[0].numel() * min(chosen, weight.shape[0])


def _scan(module: nn.Module, where: str) -> Scan | None:
    """Return a module's recurrence; None if it only convolves."""
    names = functions_of(module)
    of: Any = module
    if _DELTA in names:
        return _delta(of.num_v_heads, of.head_k_dim, of.head_v_dim)
    if _SSD in names:
        return _state_space(of.num_heads, of.head_dim, of.ssm_state_size, of.n_groups, of.chunk_size)
    if _SELECTIVE in names and not hasattr(of, "n_mamba_heads"):
        channels, states = of.intermediate_size, of.ssm_state_size
        return Scan(state=channels * states, map_=channels * states, flops=6.0 * channels * states, out=channels)
    if _LIGHTNING in names:
        return _lightning(of.num_attention_heads, of.head_dim, of.block_size)
    if names == ("causal_conv1d_fn",):
        return None
    raise UnsupportedError(f"{where} computes {', '.join(names)}, which the planner does not count: use rehearse")


def _delta(heads: int, key: int, value: int) -> Scan:
    """Count per head, in a chunk of c tokens.

    Keys and queries by keys (4 c K), the triangular system (c (K + V)), scores by values (2 c V); keys and queries by
    the state, and its update (6 K V).
    """
    c = _DELTA_CHUNK
    flops = heads * (4 * c * key + c * (key + value) + 2 * c * value + 6 * key * value)
    state = heads * key * value
    return Scan(state=state, map_=heads * key * key, flops=flops, out=heads * value, chunk_states=state / c)


def _state_space(heads: int, size: int, states: int, groups: int, chunk: int) -> Scan:
    """Count in a chunk of c tokens: C by B per group (2 c N), scores by inputs (2 c V); per head the state (4 V N)."""
    flops = 2 * chunk * states * groups + heads * (2 * chunk * size + 4 * size * states)
    state = heads * size * states
    return Scan(state=state, map_=heads, flops=flops, out=heads * size, chunk_states=state / chunk)


def _lightning(heads: int, size: int, block: int) -> Scan:
    """Count per head, in a block of c tokens: queries by keys, scores by values (4 c K), the state (4 K K)."""
    state = heads * size * size
    flops = heads * (4 * block * size + 4 * size * size)
    return Scan(state=state, map_=heads, flops=flops, out=heads * size, chunk_states=state / block)
