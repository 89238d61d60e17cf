"""Trials of a proof: a model, built the same each time, on a mesh with the options of a step, in a dtype."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from transformers import PreTrainedConfig

from ringspan.proof.float64 import in_float64_of
from ringspan.proof.options import ACCUMULATION, CLIP, OF_UPDATE
from ringspan.proof.own_code import has_own_code
from ringspan.proof.own_weights import OwnWeights
from ringspan.proof.packed import packed_copy, unpacked
from ringspan.proof.seeing import sees
from ringspan.torch.model.weights.loading import auto_class

_NOISE: Final = 0.05
"""Deviation of random weights."""
_SEED: Final = 3
"""Random numbers of the weights, the same in each trial."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is tried: its small config, and what is added to it."""

    config: PreTrainedConfig
    adapter: Any = None
    """Config of PEFT; the adapter is all that trains then."""
    packed: dict[str, Any] | None = None
    """Quantisation config of weights that bitsandbytes packs."""
    weights: OwnWeights | None = None
    """The weights of a folder in place of random ones."""

    def make(self, dtype: torch.dtype, rounded: torch.dtype | None = None) -> Any:
        """Make the model with the same weights each time; with float64, it computes in float64 throughout.

        ``rounded``: a narrower dtype, whose numbers the weights are.
        """
        model = _plain(self.config)
        if self.weights is not None:
            self.weights.fill(model)
        if rounded is not None:
            model.to(rounded).float()
        if self.packed is not None:
            packed = packed_copy(model, self.packed, rounded or torch.float32)
            model = unpacked(model, packed) if dtype == torch.float64 else packed
        if dtype == torch.float64:
            model = in_float64_of(model)
        elif self.packed is None:
            model = model.to(dtype)
        model.set_experts_implementation("eager")  # grouped products know no float64
        if self.adapter is not None:
            model = _adapted(model, self.adapter, dtype)
        return model.train()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model on a mesh with options of a step; layers compute in ``dtype``, weights are ``parameters``."""

    subject: Subject
    mesh: DeviceMesh
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: torch.dtype = torch.float64
    parameters: torch.dtype = torch.float64

    @property
    def is_exact_dtype(self) -> bool:
        """Return whether rounding can be neglected, so that one bound holds for all."""
        return self.dtype == torch.float64

    def make(self, dtype: torch.dtype | None = None) -> Any:
        """Make the model in the trial's dtype of weights, or with the same numbers in a wider one."""
        rounded = self.parameters if self.parameters.itemsize < 4 else None
        return self.subject.make(dtype or self.parameters, rounded)

    @property
    def given(self) -> dict[str, Any]:
        """Return the options for ``parallelize``."""
        options = {
            name: value for name, value in self.options.items() if name not in OF_UPDATE
        }
        if self.dtype == self.parameters:
            return options
        return options | {"compute_dtype": self.dtype}

    @property
    def micro_steps(self) -> int:
        """Return the micro-batches of an optimizer step."""
        return self.options.get(ACCUMULATION, 1)

    @property
    def most_norm(self) -> float:
        """Return the largest norm of a step's gradient; 0 for any."""
        return self.options.get(CLIP, 0.0)


def _plain(config: PreTrainedConfig) -> Any:
    """Make a model of transformers with the same random weights each time, in float32."""
    torch.manual_seed(0)
    model = auto_class(config, sees=sees(config)).from_config(
        config, dtype=torch.float32, trust_remote_code=has_own_code(config)
    )
    random = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random) * _NOISE
            # A norm's weight stays near one. Some models leave others as they come, so all are made here.
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(noise + 1 if is_norm else noise)
    return model


def _adapted(model: Any, adapter: Any, dtype: torch.dtype) -> Any:
    """Return a model with an adapter whose matrices are all random: PEFT's own begin with zeros."""
    from peft import get_peft_model

    from ringspan.torch.model.adapters import asking_as_before

    adapter = copy.deepcopy(adapter)
    if getattr(adapter, "lora_dropout", 0.0):
        adapter.lora_dropout = 0.0
    with asking_as_before():
        model = get_peft_model(model, adapter)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=random) * _NOISE
                parameter.copy_(noise)
    return model.double() if dtype == torch.float64 else model


def computing_in(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a call of a model that casts its weights to a dtype first, as a ring's layers do."""

    def call(**inputs: Any) -> Any:
        weights = {name: _cast(p, dtype) for name, p in model.named_parameters()}
        return functional_call(model, weights, kwargs=inputs)

    return call


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if weight.is_floating_point() else weight
