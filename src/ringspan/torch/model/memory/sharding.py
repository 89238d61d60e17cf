"""FSDP2 shards of weights, gradients and optimizer state over the ring, and recovery after a failed pass."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.layers.modules import as_part
from ringspan.torch.model.memory.resting import (
    Resting,
    drop_unsummed,
    groups_in,
    groups_of_state,
)
from ringspan.torch.model.memory.slices import slice_placement
from ringspan.torch.model.weights.deferred import held_regions
from ringspan.torch.model.weights.packed import split_into_parts

_log: Final = logging.getLogger(__name__)


def shard_weights(
    model: nn.Module,
    layers: Sequence[nn.Module],
    slices: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
) -> None:
    """Shard each slice's parameters, each layer's, then those around them, over the ring, in place; replicas copy."""
    # Gradients are summed over all ranks in float32, or in float64 where parameters are.
    is_double = any(
        p.dtype == torch.float64 and p.requires_grad for p in model.parameters()
    )
    split_into_parts(model)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float64 if is_double else torch.float32,
    )
    axes = (
        mesh["replicate", "ring"]
        if mesh.get_group("replicate").size() > 1
        else mesh["ring"]
    )
    placement = slice_placement(mesh.get_group("ring").size())
    for each in slices:
        fully_shard(each, mesh=axes, mp_policy=precision, shard_placement_fn=placement)
    for module in (*layers, model):
        fully_shard(module, mesh=axes, mp_policy=precision)
    Resting(layers, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global count, and gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if module._parameters:
            module.register_load_state_dict_pre_hook(
                partial(_take_whole_tensors, model)
            )


def _take_whole_tensors(
    model: Any, module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Let ``load_state_dict`` take whole tensors and keep this rank's part of each."""
    settle(model)
    for name, parameter in module._parameters.items():
        given: Any = state.get(prefix + name)
        is_whole = isinstance(given, Tensor) and not isinstance(given, DTensor)
        # For other shapes the module's own error is raised.
        if (
            isinstance(parameter, DTensor)
            and is_whole
            and given.shape == parameter.shape
        ):
            state[prefix + name] = _as_sharded(given, parameter)


def _as_sharded(given: Tensor, parameter: DTensor) -> DTensor:
    local = given.detach().new_empty(parameter.to_local().shape)
    for region in held_regions(parameter):
        local.copy_(given.detach()[region])
    return as_part(local.to(parameter.to_local().device), parameter)


@torch.compiler.disable()
def settle(model: FSDPModule) -> None:
    """Return all weights to their shards between two passes; UnsupportedError if one was changed meanwhile."""
    # FSDP leaves the outermost weights whole for the backward pass. If none follows, an optimizer created then would
    # get copies, and the next pass would use old weights. After an exception FSDP takes the next pass for the failed
    # one.
    state = _state_of(model)
    if torch._C._current_graph_task_id() != -1:  # called during backward
        return
    # A backward pass ended without its last callback.
    if state._state_ctx.post_backward_final_callback_queued:
        recover(model)
    elif state._training_state.name == "IDLE":  # not during forward either
        # Layers are resharded too, since a user may keep them whole (set_reshard_after_backward).
        written = _written_copies(model)
        for group in _groups_of(model):
            group.reshard()
        if written:
            raise UnsupportedError(
                f"{written[0]} was changed between a forward pass and its backward pass, when it was a copy of its "
                "shards: the change is lost. Change weights of model.named_parameters(), or run the forward pass under "
                "torch.no_grad()"
            )


@torch.compiler.disable()
def note_copies(model: FSDPModule) -> None:
    """Remember copies kept whole after a forward pass, to detect writes to them."""
    for parameter in _whole_parameters(model):
        parameter.ring_version = parameter._unsharded_param._version


@torch.compiler.disable()
def with_shards(model: FSDPModule, output: object) -> object:
    """Put the shards back after a forward pass and return its output; copies wait for backward."""
    # A copy's gradient is summed over ranks, so a user's penalty on a whole weight would count once for each rank.
    # Backward gets the copies back, since it calls a head again.
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: _put_in_place(model, "_unsharded_param"))
    _put_in_place(model, "sharded_param")
    return output


def _put_in_place(model: FSDPModule, kind: str) -> None:
    for parameter in _whole_parameters(model):
        parameter._setattr_on_modules(getattr(parameter, kind))


def _written_copies(model: FSDPModule) -> list[str]:
    changed = [
        p
        for p in _whole_parameters(model)
        if getattr(p, "ring_version", None) != p._unsharded_param._version
    ]
    return [
        parameter._param_fqn or "a weight"
        for parameter in changed
        if hasattr(parameter, "ring_version")
    ]


def _whole_parameters(model: FSDPModule) -> list[Any]:
    return [
        parameter
        for group in _groups_of(model)
        if group.is_unsharded
        for parameter in group.fsdp_params
    ]


def _state_of(module: FSDPModule) -> Any:
    """Return FSDP's state of a module; no public call tells whether it is in a pass."""
    return module._get_fsdp_state()


@contextmanager
def recovering_shards(model: FSDPModule) -> Iterator[None]:
    """Call ``recover`` after an exception, then raise the same exception, even if recovery fails."""
    try:
        yield
    except BaseException as error:
        try:
            recover(model)
        except Exception as failure:
            error.add_note(
                f"Then the model's weights could not be returned to their shards: {failure!r}"
            )
        raise


@torch.compiler.disable()
def recover(model: FSDPModule) -> None:
    """Return weights to their shards after an exception, for a clean next pass.

    Gradients that are summed over the ranks stay, so that a loop over micro-batches can leave out the one that failed.
    Those that wait for their sum (``set_requires_gradient_sync(False)``) are dropped with a warning: the failed pass
    may have added to them, and ``zero_grad`` does not reach them.
    """
    groups = _groups_of(model)
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    # PyTorch 2.15 would also drop gradients that are already summed, as if the failed pass had computed them.
    summed = [
        (parameter.sharded_param, parameter.sharded_param.grad)
        for parameter in parameters
    ]
    if any(_has_unsummed(group) for group in groups):
        _log.warning(
            "a pass ended in an exception while gradients waited to be summed over the ranks "
            "(set_requires_gradient_sync(False)): they are dropped; begin the step again with its first micro-batch"
        )
    for parameter in parameters:
        drop_unsummed(parameter)
    if hasattr(model, "reset_iter_state"):  # since PyTorch 2.13
        model.reset_iter_state()
    else:
        _reset_iteration(model)
    for sharded, gradient in summed:
        sharded.grad = gradient


def _has_unsummed(group: Any) -> bool:
    """Return whether a group holds gradients of earlier passes that are not summed over all ranks."""
    # The failed pass has just begun to compute this group's gradients.
    if group._training_state.name == "PRE_BACKWARD":
        return False
    copies = [
        parameter
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]
    accumulated = (
        parameter.unsharded_accumulated_grad for parameter in group.fsdp_params
    )
    gradients = [
        *(copy._unsharded_param.grad for copy in copies),
        *accumulated,
        group._partial_reduce_output,
    ]
    return any(gradient is not None for gradient in gradients)


def _reset_iteration(model: FSDPModule) -> None:
    """Do what FSDP's ``reset_iter_state`` does, with PyTorch 2.11 and 2.12."""
    context = _state_of(model)._state_ctx
    for state in context.all_states:
        state._training_state = type(state._training_state).IDLE
    for group in _groups_of(model):
        group._training_state = type(group._training_state).IDLE
        group._partial_reduce_output = None
        group.wait_for_unshard()  # a slice may be on its way
        group.reshard()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


@contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Keep gathered weights whole in passes without gradients, then reshard: no optimizer steps old copies."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [
        (
            _state_of(module)._auto_reshard_after_forward,
            [group.post_forward_mesh_info for group in groups_in(module)],
        )
        for module in modules
    ]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module, (automatic, infos) in zip(modules, before, strict=True):
            _state_of(module)._auto_reshard_after_forward = automatic
            for group, info in zip(groups_in(module), infos, strict=True):
                group.post_forward_mesh_info = info
            module.reshard()


@contextmanager
def sharded_after_layers(model: nn.Module) -> Iterator[None]:
    """Return each layer's weights to their shards after its forward pass, also within a backward pass.

    FSDP takes a forward pass within a backward pass for one layer's recomputation, and leaves all layers whole.
    """

    def reshard(module: Any, *_: object) -> None:
        # Not for a module that the user keeps whole.
        for group in groups_in(module):
            if group.post_forward_mesh_info is not None:
                group.reshard()
                # Lets backward prefetch the layer before in time.
                group._record_post_forward()

    layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [module.register_forward_hook(reshard) for module in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_whole(module: FSDPModule) -> bool:
    return any(group.is_unsharded for group in groups_in(module))


def gathered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the gathered copies of parameters, which no optimizer may be given."""
    parameters = (
        parameter for group in _groups_of(model) for parameter in group.fsdp_params
    )
    return [
        parameter._unsharded_param
        for parameter in parameters
        if hasattr(parameter, "_unsharded_param")
    ]


def unseen_parameters(model: nn.Module) -> list[str]:
    """Return the names of weights that a module holds instead of the ones that FSDP gathers."""
    names: list[str] = []
    for group in _groups_of(model):
        # Before its first pass a group is skipped, since FSDP reads all its parameters again then.
        if not group._reset_sharded_params:
            continue
        for parameter in group.fsdp_params:
            held = parameter._module_info.module._parameters.get(
                parameter._module_info.param_name
            )
            if held is parameter.sharded_param:
                shard, gathered = held._local_tensor, parameter._sharded_param_data
                is_same = (
                    shard.untyped_storage()._cdata == gathered.untyped_storage()._cdata
                )
                if not is_same and shard.numel():
                    names.append(
                        parameter._param_fqn or parameter._module_info.param_name
                    )
            elif held is not getattr(parameter, "_unsharded_param", None):
                names.append(parameter._param_fqn or parameter._module_info.param_name)
    return names


@torch.compiler.disable()
def renew_types(model: FSDPModule) -> None:
    """Renew FSDP's dtypes for parameters that had no gradient in the first pass, when FSDP reads them last."""
    # Otherwise FSDP sums their gradients in the dtype of the computation. PyTorch 2.15 reads them in every backward.
    for group in _groups_of(model):
        is_unknown = hasattr(group, "_orig_dtype") and group._orig_dtype is None
        if is_unknown and any(
            parameter.sharded_param.requires_grad for parameter in group.fsdp_params
        ):
            group._init_mp_dtypes()


def _groups_of(model: Any) -> list[Any]:
    known = (
        _state_of(model)._state_ctx.all_states
    )  # empty before the first pass, which puts all states into one context
    states = known or [
        _state_of(module)
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return [group for state in states for group in groups_of_state(state)]
