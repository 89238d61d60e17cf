"""Gradients of parts of a layer that all tokens of a rank may leave out, such as experts next to zero experts."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ringspan.torch.model.layers.modules import local_part


class Resting:
    """Let FSDP sum the gradients of parts that some ranks leave out, and of their adapters.

    FSDP sums what every rank has: a rank without a gradient would send another number of bytes than its peers. Such a
    rank contributes zeros. A part that rests on all ranks has no gradient at all, as on one process: zeros would still
    let decay and momentum move its weights. ``set_reduce_scatter_unused_params`` of torch 2.13 fills in zeros as well,
    but for every parameter of a layer, also for one that no rank ever uses.
    """

    def __init__(self, layers: Sequence[Any], mesh: DeviceMesh) -> None:
        self._mesh, self._is_agreeing = mesh, False
        self._is_awake: dict[Any, bool] = {}
        self._filled: set[Any] = set()  # parts that got zeros in this backward pass
        # Experts that are gathered in slices fill in zeros themselves, and know whether a token chose one.
        self._sliced: dict[Any, list[Any]] = {}
        for layer in layers:
            parts = _resting_parts(
                layer, has_replicas=mesh.get_group("replicate").size() > 1
            )
            every = (
                parameter
                for group in groups_in(layer)
                for parameter in group.fsdp_params
            )
            resting = [
                parameter
                for parameter in every
                if parameter._module_info.module in parts
            ]
            sliced = {
                module: [
                    parameter
                    for part in module.slices  # pyright: ignore[reportGeneralTypeIssues]
                    for group in groups_in(part)
                    for parameter in group.fsdp_params
                ]
                for module in parts
                if hasattr(module, "ring_is_awake")
            }
            if resting or sliced:
                self._sliced |= sliced
                for parameters in (resting, *sliced.values()):
                    self._is_awake |= dict.fromkeys(parameters, False)
                layer.register_forward_pre_hook(partial(self._watch, resting, sliced))

    def _watch(
        self,
        resting: list[Any],
        sliced: dict[Any, list[Any]],
        layer: nn.Module,
        args: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        every = chain(resting, *sliced.values())
        if torch.is_grad_enabled() and any(
            parameter.sharded_param.requires_grad for parameter in every
        ):
            args = (
                args[0] if args[0].requires_grad else args[0].detach().requires_grad_(),
                *args[1:],
            )
            # The gradient of the layer's input is its last, computed just before FSDP sums weight gradients.
            args[0].register_hook(lambda _: self._fill(resting, sliced))
        return args

    def _fill(self, resting: list[Any], sliced: dict[Any, list[Any]]) -> None:
        """Note which parts have a gradient on this rank, and give the others zeros."""
        for module, parameters in sliced.items():
            for parameter in parameters:
                self._is_awake[parameter] |= bool(module.ring_is_awake)
        for parameter in resting:
            whole = parameter._unsharded_param
            gradients = (
                whole.grad,
                parameter.sharded_param.grad,
                parameter.unsharded_accumulated_grad,
            )
            self._is_awake[parameter] |= any(
                self._is_own(parameter, gradient) for gradient in gradients
            )
            if whole.grad is None and whole.requires_grad:
                self._filled.add(parameter)
                whole.grad = torch.zeros_like(whole, dtype=gradient_dtype(whole))
        if not self._is_agreeing:
            self._is_agreeing = True
            # FSDP queued its own callback when backward began, so this one runs after it.
            torch.autograd.Variable._execution_engine.queue_callback(self._agree)  # pyright: ignore[reportAttributeAccessIssue]

    def _is_own(self, parameter: Any, gradient: Tensor | None) -> bool:
        """Return whether a part has a gradient of its own, and not the zeros that it was given.

        A checkpointed layer's input has a hook of its forward pass and one of its recomputation, and with torch 2.11
        both are called before FSDP sums the gradients.
        """
        if gradient is None or parameter not in self._filled:
            return gradient is not None
        return bool(local_part(gradient).any())

    def _agree(self) -> None:
        """Remove the gradient of parts that rest on all ranks."""
        awake = torch.tensor(
            [*self._is_awake.values()], dtype=torch.int32, device=self._mesh.device_type
        )
        for axis in self._mesh.mesh_dim_names or ():
            dist.all_reduce(awake, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        for each, is_awake in zip(self._is_awake, awake.tolist(), strict=True):
            if not is_awake:
                each.sharded_param.grad = None
                drop_unsummed(each)
        self._is_awake, self._is_agreeing = dict.fromkeys(self._is_awake, False), False
        self._filled.clear()
        for module in self._sliced:
            module.ring_is_awake = None


def _resting_parts(layer: nn.Module, *, has_replicas: bool) -> set[nn.Module]:
    found: set[nn.Module] = set()
    # PEFT wraps experts in adapters, so the name is cut at their base layer.
    for path, module in layer.named_modules():
        if getattr(module, "zero_expert_num", 0):
            found |= {*layer.get_submodule(path.partition(".base_layer")[0]).modules()}
        elif has_replicas and getattr(module, "rests_on_replicas", False):
            # The index in such a module has no gradients.
            found |= {*module.modules()} - {
                *getattr(module, "indexer", nn.Module()).modules()
            }
    return found


def groups_in(module: FSDPModule) -> list[Any]:
    """Return FSDP's groups of parameters of a module: one, or none without parameters."""
    return groups_of_state(module._get_fsdp_state())


def groups_of_state(state: Any) -> list[Any]:
    groups = (
        state._fsdp_param_groups
        if hasattr(state, "_fsdp_param_groups")
        else [state._fsdp_param_group]
    )
    return [group for group in groups if group is not None]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: from torch 2.15 on, a gathered copy may have its shard's."""
    return parameter.grad_dtype or parameter.dtype


def drop_unsummed(parameter: Any) -> None:
    """Drop gradients of an FSDP parameter that are not summed over the ranks yet."""
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    # Until torch 2.14, accumulated gradients are a separate attribute; since then the name is a property.
    if not isinstance(
        getattr(type(parameter), "unsharded_accumulated_grad", None), property
    ):
        parameter.unsharded_accumulated_grad = None
