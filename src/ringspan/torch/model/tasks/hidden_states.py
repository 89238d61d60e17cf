"""Decoders without a language model head: the user's embeddings in, hidden states out, the user's loss."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ringspan.core.errors import LayoutError, UnsupportedError
from ringspan.core.geometry.layout import Layout
from ringspan.core.names import LayoutName
from ringspan.torch.data.batch_layout import shard
from ringspan.torch.engine.transport.collectives import Sum
from ringspan.torch.model.attention.support import refuse_attention
from ringspan.torch.model.config_changes import check_configs
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.consistency.fixed import Fixed, Weights, check_fixed
from ringspan.torch.model.consistency.forward import in_pass, pass_facts, recovering
from ringspan.torch.model.consistency.loop_watch import watch_backward
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.modules import class_name, forward_of
from ringspan.torch.model.layers.positions import beyond_table, refuse_rope_by_length
from ringspan.torch.model.layers.router_loss import refuse_router_loss
from ringspan.torch.model.layers.view import ModelView, RingModel, decoder_on_ring
from ringspan.torch.model.memory.sharding import note_copies, renew_types, settle
from ringspan.torch.model.saving import Saved, voted
from ringspan.torch.model.splittable import refuse_weights
from ringspan.torch.runtime.foreign_mesh import ring_mesh

# Arguments that a decoder may be called with; others would need a cache, or a mask of the whole sequence.
_TAKEN: Final = {"inputs_embeds", "position_ids", "use_cache", "return_dict"}


def refuse_headless(view: ModelView) -> None:
    """Raise UnsupportedError for a model without a language model head that a ring does not compute exactly.

    A class of the user's may have one decoder of transformers inside, and otherwise only modules that compute each
    token separately.
    """
    name, model, decoder = view.name, view.model, view.decoder
    if decoder is not model and type(model).__module__.startswith("transformers."):
        raise UnsupportedError(
            f"{name} does more with its decoder's hidden states than one token at a time; use an AutoModelForCausalLM, "
            "or its decoder by itself with a loss of your own"
        )
    inner = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module is not model
    ]
    if len(inner) > (decoder is not model):
        raise UnsupportedError(
            f"{name} has several models of transformers inside; give it one decoder"
        )
    refuse_weights(model)
    refuse_attention(replace(view, stateful={}))
    if view.stateful:
        raise UnsupportedError(
            f"{name} has layers with a state or a convolution ({next(iter(view.stateful))}), which a decoder without a "
            "head does not compute over a ring yet; use an AutoModelForCausalLM"
        )
    for path, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.BatchNorm1d)):
            raise UnsupportedError(
                f"{name} must mix tokens in attention only ({path} is a {type(module).__name__})"
            )
    refuse_rope_by_length(name, decoder.config, "a decoder without a head is not told")
    refuse_router_loss(view)
    _refuse_not_causal(name, decoder)


@torch.no_grad()
def _refuse_not_causal(name: str, decoder: PreTrainedModel) -> None:
    """Raise UnsupportedError if, of four made-up tokens, the last one changes earlier hidden states."""
    like = next(decoder.parameters())
    if like.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    hidden, other = torch.randn(
        2, 1, 4, text_config(decoder.config).hidden_size, generator=generator
    ).to(like)
    modes = {module: module.training for module in decoder.modules()}
    decoder.eval()
    try:
        first = decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        hidden[:, -1] = other[:, -1]
        second = decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be called with inputs_embeds alone, which a ring needs"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    rounding = 16 * torch.finfo(like.dtype).eps * float(first.abs().max())
    if not torch.allclose(first[:, :-1], second[:, :-1], rtol=0, atol=rounding):
        raise UnsupportedError(
            f"{name} is not causal: an earlier token sees a later one, but must not"
        )


class RingDecoder(Saved, Fixed, RingModel):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    @torch.compiler.disable(recursive=False)
    def __call__(self: Any, *args: object, **kwargs: object) -> object:
        """Run a pass over local embeddings once ranks have agreed on the model, its mode and the tensors' shapes."""
        with in_pass(self, "a forward pass"):
            with meeting(self.ring_mesh, "a forward pass") as facts:
                try:
                    check_fixed(self)
                finally:
                    settle(self)
                check_configs(self.ring_configs)
                if self.ring_decoder == "":
                    _check_arguments(self, args, kwargs)
                facts.alike, facts.alike_in_ring = (
                    pass_facts(self),
                    _facts_of_ring(args, kwargs),
                )
            weights = Weights(self)
            with recovering(self):
                output = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            note_copies(self)
            return weights.until_backward(output)

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        renew_types(self)
        forward: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        return forward(
            *args,
            **kwargs | (_without_cache(self) if self.ring_decoder == "" else {}),
        )


def check_inner_call(model: Any, decoder: nn.Module) -> None:
    without = _without_cache(decoder)

    def look(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        voted(
            model,
            "the decoder's forward pass",
            lambda: _check_arguments(model, args, kwargs),
        )
        return args, kwargs | without

    decoder.register_forward_pre_hook(look, with_kwargs=True)


def _without_cache(module: Any) -> dict[str, bool]:
    """Return the arguments that turn the cache off if the decoder has one: its config may turn it on."""
    taken = inspect.signature(forward_of(module)).parameters
    # From transformers 5.24 on, a decoder takes ``use_cache`` as a variable keyword argument.
    takes_more = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    asks = takes_more and getattr(module.config, "use_cache", False)
    return {"use_cache": False} if "use_cache" in taken or asks else {}


def _check_arguments(
    model: RingModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise for a call of the decoder with anything but embeddings and this rank's positions in the layout.

    UnsupportedError for other arguments or a text beyond a learned table, LayoutError for other positions.
    """
    name, given = (
        class_name(model),
        {key: value for key, value in kwargs.items() if value is not None},
    )
    if args or "inputs_embeds" not in given or "position_ids" not in given:
        raise UnsupportedError(
            f"the decoder of {name} is called as decoder(inputs_embeds=..., position_ids=...) on a ring; make both "
            "with rs.shard_features"
        )
    if unknown := sorted(set(given) - _TAKEN):
        raise UnsupportedError(
            f"{', '.join(unknown)} cannot be honoured by the decoder of {name} on a ring; leave it out"
        )
    if given.get("use_cache"):
        raise UnsupportedError(
            f"use_cache=True: the decoder of {name} keeps no cache on a ring; leave it out"
        )
    if given.get("return_dict") is False:
        raise UnsupportedError(
            "return_dict=False is not supported on a ring; it must be True"
        )
    ring, embeddings = model.ring_axis, given["inputs_embeds"]
    length = ring.size() * embeddings.shape[1]
    layout = Layout(model.ring_layout, length, ring.size())  # pyright: ignore[reportArgumentType]
    positions = given["position_ids"]
    expected = torch.from_numpy(layout.positions(ring.get_local_rank())).to(
        positions.device
    )
    if positions.shape[-1] != len(expected) or not bool((positions == expected).all()):
        raise LayoutError(
            f"position_ids are not those of the layout {layout.name}; use rs.shard_features(features, mesh, "
            f"layout={layout.name!r})"
        )
    if error := beyond_table(model, decoder_on_ring(model), layout.length):
        raise error


def _facts_of_ring(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    return {
        f"shape of {name}": tuple(value.shape)
        for name, value in sorted(given.items())
        if isinstance(value, Tensor)
    }


def shard_features(
    features: Mapping[str, Tensor], mesh: DeviceMesh, *, layout: LayoutName = "zigzag"
) -> dict[str, Tensor]:
    """Return this rank's part of sequences of anything, and its positions, for a headless decoder.

    Every rank of a ring passes the same whole features; replicas pass different ones.

    Args:
        features: tensors (B, S, ...) of one B and S: observations, actions, targets, and a mask of ones: padding, 0
            everywhere, must be left out of the loss.
        mesh: from ``init_mesh``.
        layout: as given to ``parallelize``.

    Returns:
        The same names with (B, T, ...), and ``position_ids`` (1, T).

    Raises:
        UnsupportedError: no features, other shapes, or a feature named ``position_ids``.
    """
    mesh = ring_mesh(mesh)
    shapes = {name: tuple(tensor.shape[:2]) for name, tensor in features.items()}
    if (
        not features
        or len(set(shapes.values())) > 1
        or len(next(iter(shapes.values()))) < 2
    ):
        raise UnsupportedError(
            f"features must be tensors (batch, tokens, ...) of one batch and length, got {shapes}"
        )
    if "position_ids" in features:
        raise UnsupportedError("position_ids are those of the layout; leave them out")
    ring, length = mesh.get_group("ring"), next(iter(shapes.values()))[1]
    split, rank = Layout(layout, length, ring.size()), ring.rank()
    found = {name: shard(tensor, split, rank, 1) for name, tensor in features.items()}
    device = next(iter(features.values())).device
    return found | {
        "position_ids": torch.from_numpy(split.positions(rank))[None].to(device)
    }


def global_sum(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the differentiable sum of each rank's part of a loss over all ranks of a ring and all replicas.

    For example its tokens' summed errors over the count of all tokens. Each rank differentiates its own part: weight
    gradients, summed over ranks, equal one process's.
    """
    mesh = ring_mesh(mesh)
    return watch_backward(
        Sum.apply(value, [mesh.get_group(axis) for axis in ("replicate", "ring")])
    )
