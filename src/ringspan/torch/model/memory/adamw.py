"""AdamW with moments in host memory, or with stochastic rounding of bfloat16 parameters; a parameter at a time.

Optimizers of bitsandbytes, whose kernels take plain tensors, keep state in blocks of 256 numbers of each rank's shard.
"""

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.torch.model.layers.modules import as_part, local_part

_SEEDS: Final = 1 << 31


class _OneByOne(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [
            (p, group) for group in self.param_groups for p in group["params"]
        ]
        for number, (p, group) in enumerate(parameters, start=1):
            if p.grad is not None:
                self._update(p, local_part(p.grad), group, number)
        return loss

    def _update(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], number: int
    ) -> None:
        raise NotImplementedError


class HostAdamW(_OneByOne):
    """AdamW with moments and weight copies in host memory; the result is AdamW's.

    A step copies gradients there and weights back, one parameter at a time. With ``masters`` the host keeps float32
    moments and weights that all steps add to; the device gets them rounded to the parameter's dtype.
    """

    def __init__(
        self, params: ParamsT, *, masters: bool = False, **options: Any
    ) -> None:
        super().__init__(params, **options)
        self._masters = masters

    def _update(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], number: int
    ) -> None:
        """Update a parameter on the host, from its gradient there, and copy the result back to the device."""
        local, state = local_part(p), self.state[p]
        if not state:
            dtype = torch.float32 if self._masters else local.dtype
            state |= {"step": torch.zeros(()), "exp_avg": _on_host(local, dtype)}
            state["exp_avg_sq"] = _on_host(local, dtype)
            if self._masters:
                state["master"] = _on_host(local, dtype).copy_(local)
        weight = state["master"] if self._masters else local.to("cpu", copy=True)
        _step(weight, gradient.to("cpu", weight.dtype), state, group)
        local.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state; moments are distributed like their weights."""
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, state in packed["state"].items():
            packed["state"][index] = {
                name: _like(value, parameters[index]) for name, value in state.items()
            }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load AdamW's state, with moments in host memory."""
        super().load_state_dict(state_dict)
        if self._masters:
            _keep_float32(self, state_dict)
        for state in self.state.values():
            for name, value in state.items():
                state[name] = local_part(value).to("cpu")


class RoundingAdamW(_OneByOne):
    """AdamW with float32 moments and random rounding of bfloat16 parameters; ConfigError for others than these two.

    Rounding to nearest loses updates below 1/512 of a parameter. Here updates are computed in float32 and rounded at
    random to a neighbour, in proportion (Gupta et al. 2015, section 3): ``E[round(w)] = w``. Random numbers depend on
    step and parameter, so that replicas and resumed runs round identically.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype not in (torch.bfloat16, torch.float32):
                    raise ConfigError(
                        f"parameters of {p.dtype} cannot be rounded at random; use bfloat16"
                    )

    def _update(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], number: int
    ) -> None:
        """Update a parameter in float32, and round the result at random if the parameter is bfloat16.

        The seed is made from the step and the parameter's ``number``.
        """
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state |= {
                name: torch.zeros_like(p, dtype=torch.float32)
                for name in ("exp_avg", "exp_avg_sq")
            }
        weight = local_part(p)
        exact = weight.float()
        moments = {name: local_part(state[name]) for name in ("exp_avg", "exp_avg_sq")}
        _step(exact, gradient.float(), {"step": state["step"], **moments}, group)
        if weight.dtype == torch.bfloat16:
            generator = torch.Generator(weight.device)
            generator.manual_seed((int(state["step"]) * 1_000_003 + number) % _SEEDS)
            exact = rounded(exact, generator)
        weight.copy_(exact)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load AdamW's state; moments stay float32."""
        super().load_state_dict(state_dict)
        _keep_float32(self, state_dict)


def rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 at random with mean ``x``; exact values stay."""
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32
    )
    # Noise of up to one unit of the upper half is added, so that the lower half carries into it in proportion.
    cut = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


def _keep_float32(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Keep state float32 after ``load_state_dict``, which casts it to the parameter's dtype."""
    indices = [
        index for group in state_dict["param_groups"] for index in group["params"]
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in zip(indices, parameters, strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            if name != "step":
                optimizer.state[p][name] = value.to(
                    device=p.device, dtype=torch.float32
                )


def _step(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    tensors = (
        [weight],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
    )
    adamw(*tensors, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, **options)


def _on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, pin_memory=like.is_cuda)


def _like(value: Tensor, p: Tensor) -> Tensor:
    if not isinstance(p, DTensor) or value.ndim == 0:
        return value
    return as_part(value.to(local_part(p).device), p)


_sharded: Final[WeakKeyDictionary[Optimizer, list[list[nn.Parameter]]]] = (
    WeakKeyDictionary()
)


def is_local(optimizer: Optimizer) -> bool:
    return any(
        kind.__module__.startswith("bitsandbytes.optim")
        for kind in type(optimizer).__mro__
    )


def give_shards(optimizer: Any) -> None:
    """Put this rank's shards into an optimizer for one step; UnsupportedError if it needs norms of whole weights."""
    take_back(optimizer)  # shards that a step has left when it raised
    if not any(
        isinstance(p, DTensor)
        for group in optimizer.param_groups
        for p in group["params"]
    ):
        return
    arguments = getattr(optimizer, "args", None)
    if getattr(arguments, "max_unorm", 0.0) > 0:
        raise UnsupportedError(
            f"{type(optimizer).__name__} limits updates by the norm of a whole weight (max_unorm), of which a rank has "
            "a part; use AdamW8bit, PagedAdamW8bit or Lion8bit"
        )
    if not optimizer.initialized:
        # Before the shards are put in, since it compares parameters.
        optimizer.check_overrides()
    _sharded[optimizer] = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [_shard_of(optimizer, p) for p in group["params"]]


def take_back(optimizer: Any) -> None:
    for group, params in zip(
        optimizer.param_groups, _sharded.pop(optimizer, []), strict=False
    ):
        for p, shard in zip(params, group["params"], strict=True):
            if shard is p:
                continue
            optimizer.mng.pid2config.pop(id(shard), None)
            if shard in optimizer.state:
                optimizer.state[p] = optimizer.state.pop(shard)
        group["params"] = params


def own_state(optimizer: Any) -> dict[str, Tensor]:
    """Return a rank's own state to save, in blocks of its shards; keys have the place of the parameter."""
    if not is_local(optimizer):
        return {}
    states = [
        optimizer.state.get(p) or {}
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return {
        f"optimizer/{place}/{key}": torch.as_tensor(value)
        for place, state in enumerate(states)
        for key, value in state.items()
        if not key.startswith("qmap")
    }


def take_counts(optimizer: Any, loaded: dict[str, Tensor]) -> None:
    """Put counts of steps back, since they are plain numbers; tensors were loaded in place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in loaded.items():
        _, place, key = name.split("/")
        if key == "step":
            optimizer.state[parameters[int(place)]]["step"] = int(value)


def _shard_of(optimizer: Any, p: nn.Parameter) -> nn.Parameter:
    if not isinstance(p, DTensor):
        return p
    # The kernels take no empty tensors, so an empty shard gets no gradient.
    shard = nn.Parameter(local_part(p.detach()), requires_grad=p.requires_grad)
    if p.grad is not None and shard.numel():
        shard.grad = local_part(p.grad).contiguous()
    if p in optimizer.state:
        optimizer.state[shard] = optimizer.state.pop(p)
    if (settings := optimizer.mng.pid2config.get(id(p))) is not None:
        optimizer.mng.pid2config[id(shard)] = settings
    return shard
