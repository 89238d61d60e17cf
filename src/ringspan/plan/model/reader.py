"""A model's shape, each layer counted from transformers' own code on the meta device. C hidden size."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.geometry.layer_mask import CAUSAL, LayerMask
from ringspan.core.messages.lines import one_line
from ringspan.plan.model.kinds import Kept, LayerKind
from ringspan.plan.model.layers import (
    LayerRun,
    first_alike,
    kept_around,
    kept_of,
    products_of,
    run_layers,
)
from ringspan.plan.model.shapes import ModelShape
from ringspan.torch.mechanisms.every import MECHANISMS
from ringspan.torch.model.layers.decoder import (
    cached_kinds,
    decoder_of,
    layer_kinds,
    layers_of,
    text_config,
)
from ringspan.torch.model.layers.positions import (
    num_learned_positions,
    num_trained_positions,
)
from ringspan.torch.model.recurrent import state_of, stateful_modules
from ringspan.torch.model.support import UNSUPPORTED_FIELDS, refuse_config
from ringspan.torch.model.tensor_parallel.split import placements_of, refuse_split


def text_shape(values: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a causal language model's config; ConfigError or UnsupportedError if it has none."""
    kind = values.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(
            f"{name}: model_type={kind!r} is no language model of transformers (AutoModelForCausalLM, "
            "AutoModelForMultimodalLM); a ring does not run it"
        )
    model = built(AutoModelForCausalLM, values, name)
    return ModelShape(
        name=name, config=json.dumps(dict(values)), **decoder_values(model, name)
    )


def config_of(values: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """Return transformers' config of these values; ConfigError if its class does not take them."""
    kind = values["model_type"]
    try:
        return CONFIG_MAPPING[kind](
            **{
                key: _number(value)
                for key, value in values.items()
                if key != "model_type"
            }
        )
    except Exception as error:  # a config class may raise anything
        raise ConfigError(
            f"{name}: transformers builds no {kind} model of its config: {one_line(error)}"
        ) from error


def built(auto: Any, values: Mapping[str, Any], name: str) -> PreTrainedModel:
    """Build a config's model on the meta device by an auto class; UnsupportedError if a ring cannot run it."""
    config = config_of(values, name)
    for part in (config, text_config(config)):
        for field in UNSUPPORTED_FIELDS:
            if getattr(part, field, None):
                setattr(part, field, 0)
    try:
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # a module may raise anything
        kind = values["model_type"]
        raise ConfigError(
            f"{name}: transformers builds no {kind} model of its config: {one_line(error)}"
        ) from error
    refuse_config(model.config)
    return model


def decoder_values(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Return a decoder's fields of ``ModelShape``, layer by layer; UnsupportedError names an unknown layer."""
    decoder: Any = decoder_of(model)
    config = decoder.config
    kind = config.model_type
    named = layers_of(decoder)
    layers = [*named.values()]
    unsplit, split = _split(model, decoder)
    with suppress(Exception):  # the model may have one implementation of experts only
        model.set_experts_implementation("grouped_mm")
    # Some models look for the padding token in the tokens, which have no values; some configs must have one.
    with suppress(Exception):
        config.pad_token_id = None
    # Some layers have several attentions, and some configs number the encoder's layers.
    sees = (len(layers) * layer_kinds(config))[: len(layers)]
    # Layers of different stacks differ, as one stack may run more often.
    stacks = [path.rpartition(".")[0] for path in named]
    keeps = (len(layers) * cached_kinds(config))[: len(layers)]
    first = first_alike(layers, zip(sees, keeps, stacks, strict=True))
    try:
        runs, outside = run_layers(model, decoder, layers, first)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from error
    except Exception as error:  # code that asks for values may raise anything
        raise UnsupportedError(
            f"{name}: the planner cannot run {kind} without values: {one_line(error, 80)}"
        ) from error
    kinds: list[LayerKind] = []
    held: set[Tensor] = set()
    for number, (layer, run) in enumerate(zip(layers, runs, strict=True)):
        own = {*layer.parameters()} - held  # earlier layers count what they share
        held |= own
        if first[number] == number:
            whole = 0 if unsplit else sum(p.numel() for p in own if p not in split)
            facts = _Facts(
                layer, config.hidden_size, run, f"{name}: layer {number} of {kind}"
            )
            kinds.append(
                facts.kind(sees[number], whole, keeps=keeps[number] is not None)
            )
        else:
            kinds.append(kinds[first[number]])
        kinds[number] = replace(kinds[number], parameters=sum(p.numel() for p in own))
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return {
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "tied": output is None or output.weight is embedding.weight,
        "around": kept_around(outside, runs),
        "positions": num_learned_positions(decoder) or 0,
        "made_for": num_trained_positions(config) or 0,
        "root": model.num_parameters() - sum(each.parameters for each in kinds),
        "outside": products_of(outside, set(), inside=False),
        "kinds": tuple(kinds),
        "model_type": model.config.model_type,
        "unsplit": unsplit,
    }


def _split(model: PreTrainedModel, decoder: PreTrainedModel) -> tuple[str, set[Tensor]]:
    """Return why tensor parallelism cannot split a model, and the parameters that it splits."""
    for mechanism in MECHANISMS:
        if reason := mechanism.no_tp(decoder):
            return reason, set()
    try:
        refuse_split(model, 1)
    except UnsupportedError as error:
        return str(error), set()
    return "", {*placements_of(model, 1)}


def _number(value: object) -> Any:
    """Read a number that JSON lacks, which transformers writes as an object."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if not isinstance(value, dict):
        return value
    return (
        float(value["__float__"])
        if [*value] == ["__float__"]
        else {n: _number(each) for n, each in value.items()}
    )


def _latents_of(callers: list[nn.Module]) -> dict[str, int]:
    module: Any = callers[0] if callers else None
    if not hasattr(module, "expand_kv"):
        return {}
    return {"latent": module.kv_lora_rank, "rotary": module.qk_rope_head_dim}


class _Facts:
    """A layer's weights, sorted into children with attention or a state, and others."""

    def __init__(self, layer: nn.Module, size: int, run: LayerRun, where: str) -> None:
        """Sort a layer's weights: of children with attention or a state, and others (a feed-forward, experts).

        ``mixers``: names of the former children. ``rest``: sizes of the other weights; ``experts``: their number and
        all their weights. ``mixing``: weights of the mixers that the run used.
        """
        self.layer, self.size, self.run, self.where = layer, size, run, where
        self.stateful = stateful_modules(layer)
        if len(self.stateful) > 1:
            raise UnsupportedError(
                f"{where} has states in {', '.join(self.stateful)}; the planner counts one per layer; use --trace"
            )
        mixing = {*self.stateful.values(), *run.callers}
        self.mixers = {
            name
            for name, child in layer.named_children()
            if mixing & {*child.modules()}
        }
        inside = {
            id(p)
            for name in self.mixers
            for p in layer.get_submodule(name).parameters()
        }
        outside = [p for p in layer.parameters() if p.ndim > 1 and id(p) not in inside]
        self.rest = [p.numel() for p in outside]
        experts = [p for p in outside if p.ndim == 3]
        self.experts = (
            max((len(p) for p in experts), default=0),
            sum(p.numel() for p in experts),
        )
        self.linears = [
            each for each in layer.modules() if isinstance(each, (nn.Linear, Conv1D))
        ]
        used = inside - self._idle()
        # Decays are left out: they have the numbers of a state, and are not multiplied with a token.
        weights = [
            (path, p)
            for path, p in layer.named_parameters()
            if p.ndim > 1 and not path.endswith("A_log")
        ]
        self.mixing = sum(p.numel() for _, p in weights if id(p) in used)

    def _idle(self) -> set[int]:
        """Return the weights' ids of linear layers that this layer holds for others, like a shared layer of Zamba."""
        called = {
            *self.run.linears,
            *(each for state in self.stateful.values() for each in state.modules()),
        }
        return {id(each.weight) for each in self.linears if each not in called}

    def kind(self, sees: LayerMask, whole: int, *, keeps: bool) -> LayerKind:
        """Return this layer as the planner counts it, from its modules and a run on made-up tokens.

        ``sees``: the layer's mask. ``whole``: parameters that tensor parallelism does not split. ``keeps``: False if
        the layer takes an earlier layer's keys and values, so that a cache has nothing of this one.
        """
        scan, channels, taps, mixed = None, 0, 0, 0
        for module in self.stateful.values():
            function = state_of(module)
            scan = None if function is None else function.cost(module)
            convolution = next(
                (each for each in module.modules() if isinstance(each, nn.Conv1d)), None
            )
            if convolution is not None:
                channels, taps = convolution.in_channels, convolution.kernel_size[0]
            rows = [
                each.out_features
                for each in module.modules()
                if isinstance(each, nn.Linear)
            ]
            mixed = sum(rows) - self.size + 2 * channels
        used = products_of(self.run, self.mixers, inside=False)
        mixing = (
            self.mixing
            if self.stateful
            else products_of(self.run, self.mixers, inside=True)
        )
        products = self._products()
        linears = [each.weight for each in self.linears]
        return LayerKind(
            parameters=0,  # ``decoder_values`` sets it, without what earlier layers share
            whole=whole,
            matrices=used + mixing,
            mixing=mixing,
            feedforward=sum(self.rest),
            products=products,
            intermediate=round(used / (products * self.size)),
            **self.run.heads._asdict(),
            **({} if self.run.index else _latents_of(self.run.callers)),
            calls=max(1, len(self.run.callers)),
            mask=sees if self.run.callers else CAUSAL,
            linears=(
                len(linears),
                sum(sum(x.shape) for x in linears),
                sum(x.numel() for x in linears),
            ),
            kept=self._kept(),
            shared=self.run.shared,
            index=self.run.index,
            caches=self.run.times * len({*self.run.callers}) if keeps else 0,
            streams=max(1, self.run.input // self.size),
            experts=self.experts if used < sum(self.rest) else (0, 0),
            scan=scan,
            channels=channels,
            taps=taps,
            mixed=mixed,
        )

    def _kept(self) -> tuple[Kept, ...]:
        """Return what the run kept, and for a layer with a state what a fused kernel would keep."""
        kept = kept_of(self.run, self.layer, self.mixers)
        if not self.stateful:
            return kept
        heads, kv_heads, head_dim, value_dim = self.run.heads
        keys = Kept(heads * head_dim + kv_heads * (head_dim + value_dim))
        return Kept(self.size, self.size, self.size, 4 * self.size + 4), keys, *kept[2:]

    def _products(self) -> int:
        """Return the number of a feed-forward's products: three if gated, even if the first two are one weight."""
        large = [size for size in self.rest if 4 * size > max(self.rest)]
        return max(1, round(sum(large) / min(large))) if large and len(large) < 4 else 3
