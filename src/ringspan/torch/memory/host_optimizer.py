"""AdamW with its moments in host memory, which leaves the device to weights and activations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from ringspan.torch.layers.modules import local_part


class HostAdamW(torch.optim.AdamW):
    """AdamW with moments and weight copies in host memory; the result is AdamW's.

    A step copies gradients there and weights back, one parameter at a time. With ``masters`` the host keeps float32
    moments and weights that all steps add to; the device gets them rounded to the parameter's dtype.
    """

    def __init__(self, params: ParamsT, *, masters: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self._masters = masters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                local, state = local_part(p), self.state[p]
                if not state:
                    dtype = torch.float32 if self._masters else local.dtype
                    state |= {"step": torch.zeros(()), "exp_avg": _on_host(local, dtype)}
                    state["exp_avg_sq"] = _on_host(local, dtype)
                    if self._masters:
                        state["master"] = _on_host(local, dtype).copy_(local)
                weight = state["master"] if self._masters else local.to("cpu", copy=True)
                step_of_adamw(weight, local_part(p.grad).to("cpu", weight.dtype), state, group)
                local.copy_(weight)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state; moments are distributed like their weights."""
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, state in packed["state"].items():
            packed["state"][index] = {name: _like(value, parameters[index]) for name, value in state.items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load AdamW's state, with moments in host memory."""
        super().load_state_dict(state_dict)
        if self._masters:
            keep_float32(self, state_dict)
        for state in self.state.values():
            for name, value in state.items():
                state[name] = local_part(value).to("cpu")


def keep_float32(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Keep state float32 after ``load_state_dict``, which casts it to the parameter's dtype."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in zip(indices, parameters, strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            if name != "step":
                optimizer.state[p][name] = value.to(device=p.device, dtype=torch.float32)


def step_of_adamw(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    adamw(
        [weight],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, pin_memory=like.is_cuda)


def _like(value: Tensor, p: Tensor) -> Tensor:
    if not isinstance(p, DTensor) or value.ndim == 0:
        return value
    local = value.to(local_part(p).device)
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
