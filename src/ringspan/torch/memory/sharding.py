"""Weights, gradients and optimizer state in shards over the ring (FSDP2), and what is left of a pass that failed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_weights(
    model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype | None
) -> None:
    """Shard each layer's parameters, and those of the model around them, over the ring, in place; replicas copy.

    Gradients are summed over all ranks in float32.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    axes = mesh["replicate", "ring"] if mesh["replicate"].size() > 1 else mesh["ring"]
    for module in (*layers, model):
        fully_shard(module, mesh=axes, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global count, and gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.compiler.disable()
def settle(model: FSDPModule) -> None:
    """Between two passes: put all weights back into their shards, whatever the pass before left behind.

    FSDP leaves the outermost weights whole after a forward pass, for the backward pass. Where none follows, an
    optimizer made then would be given copies of the shards, and the next forward pass would compute with weights from
    before the update. After an exception FSDP takes the next forward pass for a part of the pass that failed.
    """
    state = _state_of(model)
    if torch._C._current_graph_task_id() != -1:  # somebody asks during backward
        return
    if state._state_ctx.post_backward_final_callback_queued:  # which has ended without its last call
        recover(model)
    elif state._training_state.name == "IDLE":  # not during forward either
        model.reshard()


def _state_of(module: FSDPModule) -> Any:
    """What FSDP knows of a module; there is no public way to ask whether it is in a pass."""
    return module._get_fsdp_state()


@torch.compiler.disable()
def recover(model: FSDPModule) -> None:
    """Put all weights back into their shards after an exception, and drop the gradients that were on their way there,
    so that the next pass begins anew.
    """
    for group in _groups_of(model):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):  # whose gradient nobody has summed over the ranks yet
                parameter._unsharded_param.grad = None
            parameter.unsharded_accumulated_grad = None
    if hasattr(model, "reset_iter_state"):  # since PyTorch 2.13
        model.reset_iter_state()
        return
    context = _state_of(model)._state_ctx
    for state in context.all_states:
        state._training_state = type(state._training_state).IDLE
    for group in _groups_of(model):
        group._training_state = type(group._training_state).IDLE
        group.reshard()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def gathered_parameters(model: Any) -> list[nn.Parameter]:
    """What stands in the place of parameters while they are whole: copies, which no optimizer may be given."""
    parameters = [parameter for group in _groups_of(model) for parameter in group.fsdp_params]
    return [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]


@torch.compiler.disable()
def renew_types(model: FSDPModule) -> None:
    """Let FSDP look again at parameters of which none needed a gradient in the first forward pass.

    It looks once. A first pass with adapters switched off, or before layers are unfrozen, leaves it without a type to
    sum gradients in, and it would take that of the computation.
    """
    for group in _groups_of(model):
        if group._orig_dtype is None and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()


def _groups_of(model: FSDPModule) -> list[Any]:
    """What FSDP gathers together: the parameters of each layer, and those around the layers."""
    groups: list[Any] = []
    for state in _state_of(model)._state_ctx.all_states:
        groups += state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
