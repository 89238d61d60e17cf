"""FSDP2 shards of weights, gradients and optimizer state over the ring, and recovery after a failed pass.

FSDP gathers a layer's weights together: no weight may be in two. transformers ties blocks of several layers (Zamba)
weight by weight; here they become one module in all of them, with its own group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ringspan.core.errors import UnsupportedError
from ringspan.torch.layers.decoder import layers_of
from ringspan.torch.layers.modules import as_part, hooks_of
from ringspan.torch.weights.deferred import held_regions
from ringspan.torch.weights.packed import split_into_parts


def shard_weights(
    model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype | None
) -> None:
    """Shard each layer's parameters, then those around them, over the ring, in place; replicas copy."""
    # Gradients are summed over all ranks in float32, or in float64 where parameters are.
    is_double = any(p.dtype == torch.float64 and p.requires_grad for p in model.parameters())
    split_into_parts(model)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float64 if is_double else torch.float32
    )
    axes = mesh["replicate", "ring"] if mesh.get_group("replicate").size() > 1 else mesh["ring"]
    for module in (*layers, model):
        fully_shard(module, mesh=axes, mp_policy=precision)
    Resting(layers, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global count, and gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if module._parameters:
            module.register_load_state_dict_pre_hook(partial(_take_whole_tensors, model))


class Resting:
    """Parts of layers that all tokens of a rank may leave out, and their adapters: FSDP sums what all ranks have.

    Such a rank gives zeros, unless the part rests on all ranks: then it has no gradient, as on one process.
    """

    def __init__(self, layers: Sequence[Any], mesh: DeviceMesh) -> None:
        self._mesh, self._is_agreeing = mesh, False
        self._is_awake: dict[Any, bool] = {}
        for layer in layers:
            parts = _resting_parts(layer, has_replicas=mesh.get_group("replicate").size() > 1)
            every = (parameter for group in _groups_in(layer) for parameter in group.fsdp_params)
            if resting := [parameter for parameter in every if parameter._module_info.module in parts]:
                self._is_awake |= dict.fromkeys(resting, False)
                layer.register_forward_pre_hook(partial(self._watch, resting))

    def _watch(self, resting: list[Any], layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(parameter.sharded_param.requires_grad for parameter in resting):
            args = (args[0] if args[0].requires_grad else args[0].detach().requires_grad_(), *args[1:])
            args[0].register_hook(lambda _: self._fill(resting))  # the layer's last, just before FSDP sums weights'
        return args

    def _fill(self, resting: list[Any]) -> None:
        for parameter in resting:
            whole = parameter._unsharded_param
            before = parameter.sharded_param.grad, parameter.unsharded_accumulated_grad
            self._is_awake[parameter] |= any(gradient is not None for gradient in (whole.grad, *before))
            if whole.grad is None and whole.requires_grad:
                whole.grad = torch.zeros_like(whole)
        if not self._is_agreeing:
            self._is_agreeing = True
            # After FSDP's own call at the end of backward, which it has asked for at its beginning.
            torch.autograd.Variable._execution_engine.queue_callback(self._agree)  # pyright: ignore[reportAttributeAccessIssue]

    def _agree(self) -> None:
        awake = torch.tensor([*self._is_awake.values()], dtype=torch.int32, device=self._mesh.device_type)
        for axis in self._mesh.mesh_dim_names or ():
            dist.all_reduce(awake, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        for each, is_awake in zip(self._is_awake, awake.tolist(), strict=True):
            if not is_awake:  # the last two hold zeros that are not summed over ranks yet (accumulation)
                each.sharded_param.grad = each._unsharded_param.grad = each.unsharded_accumulated_grad = None
        self._is_awake, self._is_agreeing = dict.fromkeys(self._is_awake, False), False


def _resting_parts(layer: nn.Module, *, has_replicas: bool) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for path, module in layer.named_modules():
        if getattr(module, "zero_expert_num", 0):  # PEFT wraps experts in their adapters
            found |= {*layer.get_submodule(path.partition(".base_layer")[0]).modules()}
        elif has_replicas and getattr(module, "rests_on_replicas", False):  # but for its index, without gradients
            found |= {*module.modules()} - {*getattr(module, "indexer", nn.Module()).modules()}
    return found


def _take_whole_tensors(model: Any, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Let ``load_state_dict`` take whole tensors and keep this rank's part of each."""
    settle(model)
    for name, parameter in module._parameters.items():
        given: Any = state.get(prefix + name)
        is_whole = isinstance(given, Tensor) and not isinstance(given, DTensor)
        # The module itself says what it thinks of other shapes.
        if isinstance(parameter, DTensor) and is_whole and given.shape == parameter.shape:
            state[prefix + name] = _as_sharded(given, parameter)


def _as_sharded(given: Tensor, parameter: DTensor) -> DTensor:
    local = given.detach().new_empty(parameter.to_local().shape)
    for region in held_regions(parameter):
        local.copy_(given.detach()[region])
    return as_part(local.to(parameter.to_local().device), parameter)


@torch.compiler.disable()
def settle(model: FSDPModule) -> None:
    """Return all weights to their shards between two passes; UnsupportedError if one was changed meanwhile."""
    # FSDP leaves the outermost weights whole for the backward pass. If none follows, an optimizer made then would get
    # copies, and the next pass would use old weights; after an exception FSDP takes the next pass for the failed one.
    state = _state_of(model)
    if torch._C._current_graph_task_id() != -1:  # somebody asks during backward
        return
    if state._state_ctx.post_backward_final_callback_queued:  # which has ended without its last call
        recover(model)
    elif state._training_state.name == "IDLE":  # not during forward either
        written = _written_copies(model)
        for group in _groups_of(model):  # layers too, where a user has them stay whole (set_reshard_after_backward)
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
    # A copy's gradient is summed over ranks: a penalty on a whole weight would count once for each of them.
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:  # a head is called again in backward
            tensor.register_hook(lambda _: _put_in_place(model, "_unsharded_param"))
    _put_in_place(model, "sharded_param")
    return output


def _put_in_place(model: FSDPModule, kind: str) -> None:
    for parameter in _whole_parameters(model):
        parameter._setattr_on_modules(getattr(parameter, kind))


def _written_copies(model: FSDPModule) -> list[str]:
    changed = [p for p in _whole_parameters(model) if getattr(p, "ring_version", None) != p._unsharded_param._version]
    return [parameter._param_fqn or "a weight" for parameter in changed if hasattr(parameter, "ring_version")]


def _whole_parameters(model: FSDPModule) -> list[Any]:
    return [parameter for group in _groups_of(model) if group.is_unsharded for parameter in group.fsdp_params]


def _state_of(module: FSDPModule) -> Any:
    """Return FSDP's state of a module; no public call tells whether it is in a pass."""
    return module._get_fsdp_state()


@torch.compiler.disable()
def recover(model: FSDPModule) -> None:
    """Return weights to their shards and drop pending gradients, for a clean pass after an exception."""
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


@contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Keep gathered weights whole during passes without gradients, then reshard: no optimizer steps stale copies."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [
        (_state_of(module)._auto_reshard_after_forward, [group.post_forward_mesh_info for group in _groups_in(module)])
        for module in modules
    ]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module, (automatic, infos) in zip(modules, before, strict=True):
            _state_of(module)._auto_reshard_after_forward = automatic
            for group, info in zip(_groups_in(module), infos, strict=True):
                group.post_forward_mesh_info = info
            module.reshard()


@contextmanager
def sharded_after_layers(model: nn.Module) -> Iterator[None]:
    """Return each layer's weights to their shards after its forward pass, also within a backward pass.

    FSDP takes a forward pass within a backward pass for one layer's recomputation, and leaves all layers whole.
    """

    def reshard(module: Any, *_: object) -> None:
        for group in _groups_in(module):
            if group.post_forward_mesh_info is not None:  # not where a user has it stay whole
                group.reshard()
                group._record_post_forward()  # by which backward gathers the layer before in time

    layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [module.register_forward_hook(reshard) for module in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_whole(module: FSDPModule) -> bool:
    return any(group.is_unsharded for group in _groups_in(module))


def gathered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the gathered copies of parameters, which no optimizer may be given."""
    parameters = (parameter for group in _groups_of(model) for parameter in group.fsdp_params)
    return [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]


def unseen_parameters(model: nn.Module) -> list[str]:
    """Return the names of weights that a module has replaced by others than FSDP gathers."""
    names: list[str] = []
    for group in _groups_of(model):
        if not group._reset_sharded_params:  # before the first pass, in which it looks at all of them again
            continue
        for parameter in group.fsdp_params:
            held = parameter._module_info.module._parameters.get(parameter._module_info.param_name)
            if held is parameter.sharded_param:
                shard, gathered = held._local_tensor, parameter._sharded_param_data
                if shard.numel() and shard.untyped_storage()._cdata != gathered.untyped_storage()._cdata:
                    names.append(parameter._param_fqn or parameter._module_info.param_name)
            elif held is not getattr(parameter, "_unsharded_param", None):
                names.append(parameter._param_fqn or parameter._module_info.param_name)
    return names


@torch.compiler.disable()
def renew_types(model: FSDPModule) -> None:
    """Renew FSDP's dtypes for parameters without gradients in the first pass, when it last looks."""
    # It would otherwise sum their gradients in the dtype of the computation.
    for group in _groups_of(model):
        if group._orig_dtype is None and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()


def _groups_of(model: Any) -> list[Any]:
    known = _state_of(model)._state_ctx.all_states  # none before the first pass, which makes them one context
    states = known or [_state_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for state in states for group in _groups_of_state(state)]


def _groups_in(module: FSDPModule) -> list[Any]:
    return _groups_of_state(_state_of(module))


def _groups_of_state(state: Any) -> list[Any]:
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class SharedBlock(NamedTuple):
    layer: str
    place: str
    first: nn.Module


def find_shared_blocks(model: nn.Module) -> list[SharedBlock]:
    """Return blocks that layers share with earlier ones; UnsupportedError for a lone shared weight."""
    owners: dict[int, str] = {}
    found: list[SharedBlock] = []
    layers = layers_of(model)
    for path, layer in layers.items():
        places: dict[str, nn.Module] = {}
        for name, parameter in layer.named_parameters():
            other = owners.setdefault(id(parameter), path)
            if other == path or any(name.startswith(f"{place}.") for place in places):
                continue
            place = _block_around(name, layer, layers[other])
            if place is None:
                raise UnsupportedError(
                    f"{type(model).__name__}: {path}.{name} is a weight of {other} too, and what is around it is not "
                    "the same in both, which is not supported yet; give each layer its own"
                )
            places[place] = layers[other].get_submodule(place)
        found += [SharedBlock(path, place, first) for place, first in places.items()]
    return found


def join_shared_blocks(model: nn.Module) -> list[nn.Module]:
    """Put the first of equal blocks into all their layers, in place; return each once."""
    blocks = find_shared_blocks(model)
    for block in blocks:
        model.get_submodule(block.layer).set_submodule(block.place, block.first)
    return list(dict.fromkeys(block.first for block in blocks))


def _block_around(name: str, layer: nn.Module, other: nn.Module) -> str | None:
    places = accumulate(name.split(".")[:-1], "{}.{}".format)
    theirs = dict(other.named_modules(remove_duplicate=False))
    alike = (each for each in places if each in theirs and _are_alike(layer.get_submodule(each), theirs[each]))
    return next(alike, None)


def _are_alike(mine: nn.Module, theirs: nn.Module) -> bool:
    weights = [{name: id(p) for name, p in block.named_parameters()} for block in (mine, theirs)]
    kinds = [[_kind_of(path, module) for path, module in block.named_modules()] for block in (mine, theirs)]
    return weights[0] == weights[1] and kinds[0] == kinds[1] and not any(True for _ in mine.buffers())


def _kind_of(path: str, module: nn.Module) -> tuple[Any, ...]:
    """Return what determines a module's computation, apart from weights: modules with own hooks differ."""
    values = {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float, str))}
    return path, type(module), hooks_of(module), vars(module).get("forward"), values
