"""AdamW for bfloat16 parameters, with stochastic rounding (Gupta et al. 2015, section 3).

Rounding to nearest loses updates below 1/512 of a parameter. Here updates are computed in float32 and rounded at random
to a neighbour, in proportion: ``E[round(w)] = w``.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ringspan.core.errors import ConfigError
from ringspan.torch.layers.modules import local_part
from ringspan.torch.memory.host_optimizer import keep_float32, step_of_adamw

_SEEDS: Final = 1 << 31


class RoundingAdamW(torch.optim.AdamW):
    """AdamW with float32 moments and random rounding of bfloat16 parameters; ConfigError for others than these two.

    Random numbers depend on step and parameter, so that replicas and resumed runs round identically.
    """

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype not in (torch.bfloat16, torch.float32):
                    raise ConfigError(f"parameters of {p.dtype} cannot be rounded at random; use bfloat16")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
                weight = local_part(p)
                exact = weight.float()
                moments = {name: local_part(state[name]) for name in ("exp_avg", "exp_avg_sq")}
                step_of_adamw(exact, local_part(p.grad).float(), {"step": state["step"], **moments}, group)
                if weight.dtype == torch.bfloat16:
                    generator = torch.Generator(weight.device)
                    generator.manual_seed((int(state["step"]) * 1_000_003 + number) % _SEEDS)
                    exact = rounded(exact, generator)
                weight.copy_(exact)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load AdamW's state; moments stay float32."""
        super().load_state_dict(state_dict)
        keep_float32(self, state_dict)


def rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 at random with mean ``x``; exact values stay."""
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    # The lower half, with noise below one unit of the upper half added, carries into it in proportion.
    cut = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)
