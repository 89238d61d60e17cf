"""Tensor parallelism by transformers' plans: each of P ranks has its share of heads, feed-forward and vocabulary.

Plans name a style per projection (Shoeybi et al. 2019, "Megatron-LM"): columns map whole inputs to shares of outputs,
rows take such shares and sum their results. Parameters become DTensors, which FSDP2 shards further; modules compute
with the local parts.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from transformers import PreTrainedConfig, PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.transport.collectives import Sum, SumOfGradients
from ringspan.torch.model.layers.blockwise.head import vocabularies
from ringspan.torch.model.layers.decoder import decoder_of, of_layers, text_config
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import (
    Mixin,
    computes_as,
    hooks_of,
    local_part,
    mix_in,
)
from ringspan.torch.model.weights.packed import is_packed

# The last is the former name of the second.
_COLUMNS: Final = (
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
)
STYLES: Final = (
    *_COLUMNS,
    "rowwise",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)


def refuse_heads(config: PreTrainedConfig, ranks: int) -> None:
    config = text_config(config)
    for field in ("num_attention_heads", "num_key_value_heads"):
        for heads in set(of_layers(config, field)):
            if heads and heads % ranks:
                raise UnsupportedError(
                    f"{config.model_type}: tp={ranks} does not divide {field}={heads}; choose a divisor"
                )


def refuse_split(model: PreTrainedModel, ranks: int) -> None:
    """Raise UnsupportedError if a model cannot be split over ``ranks`` by transformers' plan.

    Every style has to be supported and fit its module, layers must have a plan, and a split module must leave no
    parameter out of it. Dropout within layers would differ between ranks that share a token.
    """
    refuse_heads(model.config, ranks)
    name = type(model).__name__
    modules, planned = dict(model.named_modules()), _styles(model, ranks)
    styles = with_adapters(planned, modules)
    for path, style in styles.items():
        # Gathered outputs of a layer would repeat its later work on every rank; the loss needs those of the head.
        gathers = (
            style in _COLUMNS[1:]
            and modules.get(path) is not model.get_output_embeddings()
        )
        if style not in (*STYLES, WHOLE) or gathers:
            raise UnsupportedError(
                f"{name}: the tensor-parallel plan asks for {style!r} ({path}), which is not supported; use tp=1. "
                f"Supported are {', '.join(STYLES)}, gathering ones for the head alone"
            )
        _refuse_module(name, path, modules.get(path), style, ranks)
    # A plan may split only the head and no layer.
    if "rowwise" not in styles.values():
        raise UnsupportedError(
            f"transformers has no tensor-parallel plan for the layers of {name}; use tp=1"
        )
    # A scale per head, for example, that stays whole next to split projections would scale the wrong heads.
    for path in sorted(
        {
            path.rpartition(".")[0]
            for path, style in planned.items()
            if style in ("colwise", "rowwise")
        }
    ):
        for parameter, _ in modules[path].named_parameters():
            if f"{path}.{parameter}".rpartition(".")[0] not in styles:
                raise UnsupportedError(
                    f"{name}: the tensor-parallel plan splits {path} but says nothing of its {parameter}; use tp=1"
                )
    if why := family_of(decoder_of(model).config).no_tp:
        raise UnsupportedError(f"{name}: {why}; use tp=1")
    for path, module in modules.items():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedError(
                f"{name}: dropout {module.p} ({path}) would differ between the ranks that share a token; set it to 0, "
                "or use tp=1"
            )


def _refuse_module(
    name: str, path: str, module: nn.Module | None, style: str, ranks: int
) -> None:
    """Raise UnsupportedError for a planned module of another kind, or one changed, packed or not divisible."""
    wanted = nn.Embedding if style == "embedding_rowwise" else nn.Linear
    if style in ("replicated_with_grad_allreduce", WHOLE):
        return
    if not isinstance(module, wanted):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise UnsupportedError(
            f"{name}: {style} is for {wanted.__name__}, {path} is a {kind}; use tp=1"
        )
    if wanted is nn.Linear and not computes_as(module, nn.Linear):
        raise UnsupportedError(
            f"{name}: {path} has hooks, a parametrization or a forward of its own, which would see the share of one "
            "rank; use tp=1"
        )
    if is_packed(module.weight):
        raise UnsupportedError(
            f"{name}: {path} is packed (a {type(module.weight).__name__}); use tp=1"
        )
    size = module.weight.shape[1 if style == "rowwise" else 0]
    if size % ranks:
        raise UnsupportedError(
            f"{name}: tp={ranks} does not divide the {size} features of {path}; choose a divisor"
        )


def placements_of(model: PreTrainedModel, ranks: int) -> dict[Tensor, Placement]:
    modules, placements = dict(model.named_modules()), dict[Tensor, Placement]()
    for path, style in with_adapters(_styles(model, ranks), modules).items():
        for name, parameter in modules[path].named_parameters(recurse=False):
            if style in (*_COLUMNS, "embedding_rowwise"):
                placements[parameter] = Shard(0)
            elif style == "rowwise" and name == "weight":
                placements[parameter] = Shard(1)
    return placements


def split_model(model: PreTrainedModel, tp: DeviceMesh) -> None:
    """Split a model over ``tp`` by its plan, in place, after ``refuse_split``; other parameters become whole DTensors.

    Embedding and head, which may be one tensor, are split by vocabulary if it divides evenly.
    """
    modules = dict(model.named_modules())
    styles, placements = (
        with_adapters(_styles(model, tp.size()), modules),
        placements_of(model, tp.size()),
    )
    split: dict[Tensor, nn.Parameter] = {}
    for path, module in modules.items():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            # Tied weights, such as embedding and head, must remain one parameter.
            if parameter not in split:
                placement = placements.get(parameter, Replicate())
                # No source rank, so nothing is sent: ``parallelize`` has made weights equal on every rank.
                whole = distribute_tensor(
                    parameter.detach(), tp, [placement], src_data_rank=None
                )
                split[parameter] = nn.Parameter(
                    whole, requires_grad=parameter.requires_grad
                )
            module._parameters[name] = split[parameter]
        if own:
            mix_in(
                module,
                _MIXINS.get(styles.get(path, ""), Whole),
                tp_group=tp.get_group(),
            )
        if isinstance(module, _Vocabulary) and module.padding_idx is not None:
            # Only the rank that has the padding row keeps its gradient at zero.
            rows = module.num_embeddings // tp.size()
            is_here = module.padding_idx // rows == tp.get_local_rank()
            module.padding_idx = module.padding_idx % rows if is_here else None
    inputs: dict[str, _Inputs] = {}
    for path, style in styles.items():
        if style in _COLUMNS:
            parent = path.rpartition(".")[0]
            # q, k and v read one input: its gradient is summed once for all three, not once for each.
            if parent not in inputs and style == "colwise":
                inputs[parent] = _Inputs()
                mix_in(modules[parent], _Siblings, tp_inputs=inputs[parent])
            modules[path].tp_inputs = inputs.get(parent, _Inputs())  # pyright: ignore[reportArgumentType]
            modules[path].tp_gathers = style != "colwise"  # pyright: ignore[reportArgumentType]


def splits_vocabulary(head: nn.Module) -> bool:
    """Return whether the axis splits a head's vocabulary, rather than repeating it."""
    return isinstance(head, _Columns)


def _styles(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """Return the style of each module by transformers' plan, whose names have * for the number of a layer.

    Embedding and head are both split if the vocabulary divides evenly, or else both left whole.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]
    styles = {
        name: plan[general]
        for name in names
        if (general := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in plan
    }
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    ends = {paths[head]: "colwise_gather_output", paths[embedding]: "embedding_rowwise"}
    # A vocabulary that does not divide evenly stays whole, because padding would change the softmax.
    if any(size % ranks for size in vocabularies(model)):
        for path in ends:
            styles.pop(path, None)
    elif not styles.keys().isdisjoint(ends):
        styles |= ends  # older plans name only the head
    return styles


class Whole(Mixin):
    """A module that computes with its local parameters, whole or used as they are."""

    tp_group: dist.ProcessGroup
    _parameters: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._local():
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def _local(
        self, change: Callable[[Tensor], Tensor] = lambda p: p, leave_out: str = ""
    ) -> Iterator[None]:
        whole = {
            name: p for name, p in self._parameters.items() if isinstance(p, DTensor)
        }
        self._parameters |= {
            name: None if name == leave_out else change(local_part(p))
            for name, p in whole.items()
        }
        try:
            yield
        finally:
            self._parameters |= whole


class _PerHead(Whole):
    """A module whose parameters all heads share; gradients are summed over ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._local(lambda p: SumOfGradients.apply(p, self.tp_group)):
            return super(Whole, self).forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class _Inputs:
    """The input of sibling projections in one call of their parent: gradients are summed once."""

    def __init__(self) -> None:
        self.is_open = False
        self._seen: tuple[Tensor, Tensor] | None = None

    def share(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        # Compared by identity: siblings get the same tensor, and an equal tensor of another call is not theirs.
        if self._seen is not None and self._seen[0] is x:
            return self._seen[1]
        shared = SumOfGradients.apply(x, group)
        self._seen = (x, shared) if self.is_open else None
        return shared

    def close(self) -> None:
        self.is_open, self._seen = False, None


class _Siblings:
    tp_inputs: _Inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.tp_inputs.is_open = True
        try:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            self.tp_inputs.close()


class _Columns(Whole):
    """A projection from a whole input to this rank's share of its outputs: (B, T, C) -> (B, T, outputs / P)."""

    tp_inputs: _Inputs
    tp_gathers: bool

    def forward(self, x: Tensor) -> Tensor:
        _refuse_hooks(self)
        out = super().forward(self.tp_inputs.share(x, self.tp_group))
        return _Gather.apply(out, self.tp_group) if self.tp_gathers else out


class _Rows(Whole):
    """A projection from this rank's share of the inputs to whole outputs: (B, T, inputs / P) -> (B, T, C)."""

    def forward(self, x: Tensor) -> Tensor:
        _refuse_hooks(self)
        # The bias is whole on every rank, and would be summed P times if each part had it.
        with self._local(leave_out="bias"):
            part = super(Whole, self).forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        out = Sum.apply(part, [self.tp_group])
        bias = self._parameters.get("bias")
        return out if bias is None else out + local_part(bias)


def _refuse_hooks(projection: Any) -> None:
    if hooks_of(projection):
        raise UnsupportedError(
            f"a {type(projection).__name__} that tp splits has hooks, which see the share of one rank; put them on the "
            "module around it, or use tp=1"
        )


class _Vocabulary(Whole):
    """An embedding with this rank's rows: (B, T) -> (B, T, C)."""

    weight: Tensor
    num_embeddings: int
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        rows = len(local_part(self.weight))
        first = rows * dist.get_rank(self.tp_group)
        is_here = (tokens >= first) & (tokens < first + rows)
        # Tokens of other ranks read some row of this rank, whose result is then masked.
        part = super().forward((tokens - first).clamp(0, rows - 1))
        return Sum.apply(part * is_here.unsqueeze(-1), [self.tp_group])


_MIXINS: Final[dict[str, type]] = {
    **dict.fromkeys(_COLUMNS, _Columns),
    "rowwise": _Rows,
    "embedding_rowwise": _Vocabulary,
    "replicated_with_grad_allreduce": _PerHead,
}


class _Gather(torch.autograd.Function):
    """All ranks' shares of the last dimension, side by side; what follows is the same on every rank."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), part.shape[-1]  # pyright: ignore[reportAttributeAccessIssue]
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.rank * ctx.size, ctx.size), None


WHOLE: Final = "whole"  # style of a module that every rank holds whole

_LORA: Final = "peft.tuners.lora"


def with_adapters(
    styles: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> dict[str, str]:
    """Replace LoRA adapters in projection styles by their parts; refuse adapters that are more than two matrices."""
    result: dict[str, str] = {}
    for path, style in styles.items():
        module: Any = modules.get(path)
        if style not in ("colwise", "rowwise") or not _is_lora(module):
            result[path] = style
            continue
        if module.lora_variant or len(module.lora_embedding_A):
            names = ", ".join(
                sorted(
                    {type(variant).__name__ for variant in module.lora_variant.values()}
                )
            )
            raise UnsupportedError(
                f"{path} has an adapter that tp cannot split ({names}); use plain LoRA, or tp=1"
            )
        result[f"{path}.base_layer"] = style
        for name in module.lora_A:
            result[f"{path}.lora_A.{name}"] = WHOLE if style == "colwise" else style
            result[f"{path}.lora_B.{name}"] = style if style == "colwise" else WHOLE
    return result


def _is_lora(module: object) -> bool:
    return (
        type(module).__module__.startswith(_LORA) and type(module).__name__ == "Linear"
    )
