"""Detection of NaN and infinity in weights, as a diverged run leaves them."""

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringspan.core.errors import ConfigError

_NUMBERS: Final = 1 << 24  # at a time, of which torch may make a copy


def refuse_not_finite(named: Iterable[tuple[str, Tensor]], *, masks: bool = True) -> None:
    """Raise ConfigError for NaN and infinity in unpacked weights; ``masks`` allows -inf in vectors (bias, sinks)."""
    for name, weight in named:
        if count := _num_not_finite(weight, masks=masks):
            raise ConfigError(
                f"{name} has {count} numbers that are NaN or infinite; take weights from before a run diverged, or "
                "convert or download them again"
            )


def named_in(model: nn.Module, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a submodule's parameters by their names in the model."""
    ours = {id(parameter) for parameter in part.parameters()}
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) in ours)


@torch.no_grad()
def _num_not_finite(weight: Tensor, *, masks: bool) -> int:
    known = weight.is_floating_point() and weight.dtype != torch.float4_e2m1fn_x2
    if not known or weight.is_meta or isinstance(weight, DTensor):
        return 0
    count = 0
    for part in weight.detach().reshape(-1).split(_NUMBERS):
        part = part.float() if part.dtype.itemsize == 1 else part  # torch does not add up float8
        if not part.sum().isfinite():  # at the speed of memory; of float16 the sum of finite numbers may be infinite
            wrong = ~part.isfinite()
            count += int((wrong & (part != -torch.inf) if masks and weight.ndim < 2 else wrong).sum())
    return count
