"""Checks of tensors and groups before anything moves."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringspan.core.arguments import check_shapes
from ringspan.core.errors import UnsupportedError
from ringspan.core.messages.numbers import described
from ringspan.torch.runtime.mesh import check_order

_T = TypeVar("_T")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UnsupportedError for shapes, dtypes or a device that no kernel serves."""
    check_shapes(q.shape, k.shape, v.shape)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; make them equal"
            )
    if q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"dtype {q.dtype} is not supported; use float32 or bfloat16"
        )
    if q.dtype == torch.float16 and q.device.type == "cpu":
        raise UnsupportedError(
            "float16 on CPU is not supported; use float32 or bfloat16"
        )


def check_plain(name: str, tensor: object) -> None:
    """Raise UnsupportedError for anything but a dense tensor that is whole on this rank."""
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"{name} is a DTensor; pass this rank's part, {name}.to_local()"
        )
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(
            f"{name} must be a torch.Tensor, got {described(tensor)}"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = (
            "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        )
        raise UnsupportedError(f"{name} is a {kind} tensor; pass a dense one")


def check_heads(q: Tensor, slopes: Tensor | None, sinks: Tensor | None) -> None:
    for name, per_head in (("slopes", slopes), ("sinks", sinks)):
        if per_head is None:
            continue
        check_plain(name, per_head)
        if (
            per_head.shape != q.shape[1:2]
            or per_head.device != q.device
            or not per_head.is_floating_point()
        ):
            raise UnsupportedError(
                f"{name} must be one number for each of the {q.shape[1]} query heads on {q.device}, in floating point, "
                f"got {per_head.dtype} of shape {tuple(per_head.shape)} on {per_head.device}"
            )
    if slopes is not None and slopes.requires_grad:
        raise UnsupportedError(
            "slopes are constants of ALiBi and get no gradient; pass slopes.detach()"
        )


def check_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> None:
    """Raise UnsupportedError unless hidden (T, C), weight (V, C), targets (T,) and bias (V,) fit each other."""
    floats = {"hidden": hidden, "weight": weight} | (
        {} if bias is None else {"bias": bias}
    )
    for name, x in (floats | {"targets": targets}).items():
        check_plain(name, x)
        if x.device != hidden.device:
            raise UnsupportedError(
                f"{name} is on {x.device}, hidden on {hidden.device}; put them on one device"
            )
    (vocabulary, size), tokens = (*weight.shape, 0, 0)[:2], targets.shape[:1]
    expected = {
        "weight": (vocabulary, size),
        "hidden": (*tokens, size),
        "bias": (vocabulary,),
        "targets": (*tokens,),
    }
    if any(
        tuple(x.shape) != expected[name]
        for name, x in (floats | {"targets": targets}).items()
    ):
        given = ", ".join(
            f"{name} {tuple(x.shape)}"
            for name, x in (floats | {"targets": targets}).items()
        )
        raise UnsupportedError(
            f"shapes do not fit: {given}; they must be hidden (tokens, size), weight (vocabulary, size), targets "
            "(tokens,) and bias (vocabulary,)"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(f"targets must be int64 or int32, got {targets.dtype}")
    for name, x in floats.items():
        # A narrower weight is read as exactly as it is; a wider one would be rounded.
        is_read = (
            torch.is_autocast_enabled(x.device.type)
            or torch.promote_types(x.dtype, hidden.dtype) == hidden.dtype
        )
        if not x.is_floating_point() or (name == "weight" and not is_read):
            raise UnsupportedError(
                f"{name} is {x.dtype}, hidden is {hidden.dtype}; make them equal, in floating point"
            )
    check_differentiation("blockwise_cross_entropy", hidden, weight, bias)


def check_differentiation(what: str, *tensors: Tensor | None) -> None:
    """Raise UnsupportedError for forward-mode differentiation (torch gives zero tangents) and torch.func."""
    if not torch.compiler.is_compiling() and not is_transformed():
        return
    for x in tensors:
        if x is None:
            continue
        if forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                f"{what} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad); use reverse mode: "
                "torch.autograd.grad or backward"
            )
        # Dynamo cannot trace this question; traced code gets torch's own error.
        functorch: Any = torch._C._functorch  # pyright: ignore
        if not torch.compiler.is_compiling() and functorch.is_gradtrackingtensor(x):
            raise UnsupportedError(
                f"{what} is not differentiated by torch.func (grad, vjp, jacrev, hessian); use torch.autograd.grad or "
                "backward"
            )


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is at work."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    return (
        functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def find_group(group: object) -> dist.ProcessGroup | None:
    """Return a caller's group: a 1-D mesh's own, the default for None, None without torch.distributed.

    Raises:
        UnsupportedError: no group, one without this rank or destroyed, or a mesh of several dimensions.
        ConfigError: a mesh whose ranks do not ascend.
    """
    if isinstance(group, dist.ProcessGroup) and group in c10d._world.pg_map:
        return group  # there, and with this rank
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            axes = ", ".join(map(repr, group.mesh_dim_names or ()))
            raise UnsupportedError(
                f"group is a mesh of {group.ndim} dimensions ({axes or 'without names'}); pass one of them, as in "
                'mesh["ring"]'
            )
        check_order(group)
        group = _alive(group.get_group)
    if group is None:
        return (
            dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        )
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            "this rank is not in the group; call it only on the ranks that dist.new_group was given"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedError(
            f"group must be a process group, a mesh of one dimension or None, got {described(group)}; make one with "
            'dist.new_group, or pass mesh["ring"]'
        )
    if _alive(lambda: dist.get_rank(group)) < 0:
        raise UnsupportedError(
            f"rank {dist.get_rank()} is not in the group; call it only on the ranks that are"
        )
    return group


def _alive(ask: Callable[[], _T]) -> _T:
    """Return ``ask()``; raise UnsupportedError if the group is gone, which torch does not say clearly."""
    try:
        return ask()
    except (KeyError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            "the process group was destroyed (dist.destroy_process_group), or is one of a world that was; make a new "
            "one with dist.new_group, and a mesh with rs.init_mesh"
        ) from error
