"""Refusal of changes to a model on the ring, whose later parameters FSDP2 ignores, and of direct calls of its parts."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final, Never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ringspan.core.errors import UnsupportedError
from ringspan.core.step_config import StepConfig
from ringspan.torch.model.layers.modules import (
    Mixin,
    class_name,
    local_part,
    modules_in,
    refusing,
)
from ringspan.torch.model.layers.view import RingModel
from ringspan.torch.model.memory.sharding import gathered_parameters, unseen_parameters

_log: Final = logging.getLogger(__name__)
HOOKED = (
    "has a gradient hook, which FSDP never calls; change parameter.grad between backward and the optimizer's step, or "
    "use register_post_accumulate_grad_hook after parallelize"
)
_REMEDY: Final = (
    "copy into it instead (under torch.no_grad, parameter.copy_), or load_state_dict"
)
_STORAGE: Final = "ring_storage"  # attribute of a parameter: the storage that it had
_OF_TRAINING: Final = "z_loss", "label_smoothing", "layers_per_checkpoint", "offload"
_REPLACED: Final = "was replaced after parallelize, and would not be used"
Parameters = dict[str, nn.Parameter | None]


class Structure:
    """The modules of a model that have parameters, with the names of these.

    A pass has to know whether both still are the same. Dicts that are equal say so without a walk through the modules;
    dicts ignore order, which PEFT's LoRA of a parameter changes in a pass.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = modules_in(model)
        parents = [module for module in modules if module._modules]
        # Each list is compared with the other in one call, in every pass.
        self._children = [module._modules for module in parents]
        self._children_before = [dict(module._modules) for module in parents]
        self._without = [
            module._parameters for module in modules if not module._parameters
        ]
        self.names = {
            module: dict.fromkeys(module._parameters)
            for module in modules
            if module._parameters
        }
        self.own: list[Parameters] = [module._parameters for module in self.names]
        self._names_before = [names.keys() for names in self.names.values()]

    def first_change(self, model: nn.Module) -> str | None:
        """Return the path of the first module that is new or has other parameters; None if all is as it was.

        Modules without parameters may be put in and taken out.
        """
        if self._is_same():
            return None
        found = Structure(model)
        if found.names != self.names:
            paths = _paths(model)
            changed = (
                module
                for module, names in found.names.items()
                if self.names.get(module) != names
            )
            first = next(changed, None)
            return "a module is gone" if first is None else paths[first]
        vars(self).update(vars(found))  # modules without parameters may be others
        return None

    def _is_same(self) -> bool:
        if any(self._without):
            return False
        if self._children != self._children_before:
            return False
        return [*map(dict.keys, self.own)] == self._names_before


def known_parameters(model: RingModel) -> list[nn.Parameter]:
    """Return the parameters of the model as it was when it was put on the ring, each once."""
    # A tensor's hash is a call of Python, an id is not.
    found = {
        id(parameter): parameter
        for parameters, names in _places(model)
        for name in names
        if (parameter := parameters[name]) is not None
    }
    return [*found.values()]


def _places(model: RingModel) -> Iterator[tuple[Parameters, Iterable[str]]]:
    """Yield the dict of parameters of each module, and the names that were in it."""
    known: Structure = model.ring_structure
    return zip(known.own, known.names.values(), strict=True)


def check_fixed(model: RingModel) -> None:
    """Raise UnsupportedError for the first change to a model since ``parallelize``, in one walk."""
    if model.loss_function is not model.ring_loss_function:
        raise UnsupportedError(
            f"the loss function of {class_name(model)} was changed, which a ring does not call; compute a loss of your "
            "own from the logits of model(**batch) without labels"
        )
    known: Structure = model.ring_structure
    if changed := known.first_change(model):
        raise UnsupportedError(
            f"the parameters of {class_name(model)} changed after parallelize ({changed}), which "
            "ranks would not share; change the model before"
        )
    if _may_have_changed(known.own):
        _refuse_problem(model, known)
    if unseen := unseen_parameters(model):
        raise UnsupportedError(f"{unseen[0]} {_REPLACED}; {_REMEDY}")


def _may_have_changed(own: Iterable[Parameters]) -> bool:
    """Return whether a parameter is anything but a shard with the data that it had, and no hook of its gradient."""
    for parameters in own:
        for parameter in parameters.values():
            if parameter is not None and (
                parameter._backward_hooks
                or parameter.__dict__.get(_STORAGE)
                != parameter.untyped_storage()._cdata
            ):
                return True
    return False


def _refuse_problem(model: RingModel, known: Structure) -> None:
    """Raise UnsupportedError for the first parameter that has changed, if one has: copies of shards are fine."""
    copies = {id(parameter) for parameter in gathered_parameters(model)}
    for module, parameters in zip(known.names, known.own, strict=True):
        for name, parameter in parameters.items():
            if parameter is not None and (problem := _problem(parameter, copies)):
                path, (what, remedy) = _paths(model)[module], problem
                raise UnsupportedError(f"{path}.{name}{what}; {remedy}")


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _problem(parameter: Tensor, copies: set[int]) -> tuple[str, str] | None:
    """Return a parameter's change since ``parallelize``, to be read after its name, and the remedy; None without."""
    is_shard = isinstance(parameter, DTensor)
    if not is_shard and id(parameter) not in copies:
        return f" {_REPLACED}", _REMEDY
    if is_shard and _is_of_other_data(parameter):
        return (
            ".data was set after parallelize, which does not reach its shard",
            _REMEDY,
        )
    if parameter._backward_hooks:
        what, _, remedy = HOOKED.partition("; ")
        return f" {what}", remedy
    return None


class Weights:
    """Parameters of a forward pass, which must be unchanged in its backward pass.

    Backward gathers them again and recomputes layers with them. Autograd saves neither, so it cannot detect a change.
    """

    def __init__(self, model: RingModel) -> None:
        self._model = model
        self._places = [
            (parameters, name) for parameters, names in _places(model) for name in names
        ]
        self._shards = [parameters[name] for parameters, name in self._places]
        self._before = self._versions()
        self._is_evaluated = not model.training

    @torch.compiler.disable()
    def until_backward(self, output: object) -> object:
        """Return the pass's output, whose backward pass raises UnsupportedError if a parameter was changed."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward())
        return output

    def _begin_backward(self) -> None:
        """Raise UnsupportedError if a parameter has changed since forward; warn of evaluation mode once.

        Copies that FSDP kept since forward get the shards' ``requires_grad``, which may have changed meanwhile.
        """
        now = self._versions()
        if now != self._before:
            pairs = zip(self._shards, self._before, now, strict=True)
            changed = next(shard for shard, was, is_now in pairs if was != is_now)
            name = next(
                (
                    name
                    for name, each in self._model.named_parameters()
                    if each is changed
                ),
                "a weight",
            )
            raise UnsupportedError(
                f"{name} was changed between a forward pass and its backward pass, which computes with it again; step "
                "the optimizer after backward"
            )
        if self._is_evaluated and not self._model.ring_said_evaluation:
            self._model.ring_said_evaluation = True
            _warn_of_evaluation(self._model)
        for (parameters, name), shard in zip(self._places, self._shards, strict=True):
            held = parameters.get(name)
            if (
                held is not None
                and shard is not None
                and held.requires_grad != shard.requires_grad
            ):
                held.requires_grad_(shard.requires_grad)

    def _versions(self) -> list[tuple[int, int] | None]:
        # Optimizers write to a parameter and others to its shard; each has a version counter.
        return [
            None
            if each is None
            else (each._version, getattr(each, "_local_tensor", each)._version)
            for each in self._shards
        ]


def _warn_of_evaluation(model: RingModel) -> None:
    """Log the options that a pass with a backward pass has left out, since the model is in evaluation mode."""
    plain, step = StepConfig(), model.ring_step
    options = {
        name: getattr(step, name)
        for name in _OF_TRAINING
        if getattr(step, name) != getattr(plain, name)
    }
    if step.checkpoint != "none":
        options["checkpoint"] = step.checkpoint
    if options and model.ring_mesh.get_rank() == int(model.ring_mesh.mesh.min()):
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        _log.warning(
            "%s learns in evaluation mode, as from_pretrained returns it, and %s applies to training mode only; call "
            "model.train()",
            class_name(model),
            shown,
        )


def note_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        _is_of_other_data(parameter)


def note_buffers(model: RingModel, layers: Iterable[nn.Module]) -> None:
    paths = {module: path for path, module in model.named_modules()}
    parts = (part for layer in layers for part in layer.modules())
    model.ring_buffers = [
        (f"{paths[part]}.{name}", part, name)
        for part in parts
        for name in part._buffers
    ]


@contextmanager
def keeping_buffers(model: RingModel) -> Iterator[None]:
    """Raise UnsupportedError on all ranks if a layer changes its buffers in training (batch norm)."""
    if not (model.training and torch.is_grad_enabled()):
        yield
        return
    before = [(path, buffer, buffer._version) for path, buffer in _buffers(model)]
    yield
    for path, buffer, version in before:
        if buffer._version != version:
            raise UnsupportedError(
                f"{path} changed in a forward pass: a ring changes it on each rank, from the tokens of that rank, and "
                "once more where a layer is recomputed; call eval() on that module, or leave it out"
            )


def _buffers(model: RingModel) -> Iterator[tuple[str, Tensor]]:
    for path, part, name in model.ring_buffers:
        if (buffer := part._buffers.get(name)) is not None:
            yield path, buffer


def _is_of_other_data(parameter: Tensor) -> bool:
    """Return whether ``parameter.data`` was set, which a DTensor ignores; ``to_empty`` is fine."""
    storage = parameter.untyped_storage()._cdata
    return vars(parameter).setdefault(_STORAGE, storage) != storage


class Fixed:
    @property
    def _ddp_params_and_buffers_to_ignore(self: Any) -> Never:
        """Refuse ``DistributedDataParallel``, which asks this before it looks at the parameters."""
        raise UnsupportedError(
            f"{class_name(self)} is on a ring, which adds up its gradients; leave out DistributedDataParallel, and "
            "with Accelerate use ringspan.hf.ring_accelerator, whose prepare leaves the model as it is"
        )

    def _apply(
        self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> object:
        """Refuse ``to``, ``half``, ``cuda``, ... that change dtypes or devices, except off the meta device."""
        for dtype, device in {
            (p.dtype, p.device) for p in map(local_part, self.parameters())
        }:
            probe = torch.empty(0, dtype=dtype, device=device)
            changed = fn(probe)
            if changed.dtype != probe.dtype:
                raise UnsupportedError(
                    f"{class_name(self)} is on a ring with parameters of {probe.dtype}: make them {changed.dtype} "
                    "before parallelize, or let layers compute in it with parallelize(compute_dtype=...)"
                )
            if changed.device != probe.device and not probe.is_meta:
                raise UnsupportedError(
                    f"{class_name(self)} is on a ring of {probe.device}; leave it there, where its mesh has it"
                )
        return super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]

    share_memory = refusing(  # moving FSDP's shards would end the process
        "{model} is on a ring, and its shards stay in the memory of their process; call share_memory before "
        "parallelize, or give other processes what save_pretrained writes"
    )
    # Called by pickle.dumps and torch.save.
    __reduce_ex__ = refusing(
        "{model} is on a ring and cannot be pickled; save_pretrained writes the model, torch.save of "
        "model.state_dict() its shards"
    )
    resize_token_embeddings = refusing(
        "resize_token_embeddings comes before parallelize; call it there"
    )
    add_adapter = refusing(
        "call add_adapter before parallelize, which splits adapters with all other weights"
    )
    load_adapter = refusing(
        "call load_adapter before parallelize, which splits adapters with all other weights"
    )
    delete_adapter = refusing(
        "call delete_adapter before parallelize, or set_adapter and disable_adapters after"
    )
    gradient_checkpointing_enable = gradient_checkpointing_disable = refusing(
        "layers on a ring are checkpointed by parallelize(checkpoint='attention'), 'full' or 'none'; leave "
        "gradient_checkpointing out"
    )
    activation_checkpointing_enable = activation_checkpointing_disable = (
        gradient_checkpointing_enable
    )


refuse_copy = refusing(  # copy.deepcopy
    "{model} is on a ring and cannot be copied; build it again and parallelize that, or save_pretrained"
)


_passes: Final[list[str]] = []  # the calls of models that this process is in


@contextmanager
def calling_parts(name: str) -> Iterator[None]:
    _passes.append(name)
    try:
        yield
    finally:
        _passes.pop()


def refuse_own_calls(model: nn.Module, decoder: str) -> None:
    """Make the decoder, embeddings, layers, norm and head raise outside of a pass."""
    path = accumulate(decoder.split("."), "{}.{}".format)
    children = [
        child
        for module in (model, *map(model.get_submodule, path))
        for child in module.children()
    ]
    children += [
        layer
        for child in children
        if isinstance(child, nn.ModuleList)
        for layer in child
    ]
    # One for each class: layers of one class share compiled programs.
    kinds: dict[type, type] = {}
    for part in dict.fromkeys(children):
        if (
            not isinstance(part, nn.ModuleList)
            and next(part.parameters(), None) is not None
        ):
            plain = type(part)
            if plain not in kinds:
                kinds[plain] = type(
                    plain.__name__, (_Part, plain), {"__module__": plain.__module__}
                )
            part.__class__ = kinds[plain]


class _Part(Mixin):
    # Allowed in a pass, and in backward, which recomputes parts.
    def __call__(self: Any, *args: object, **kwargs: object) -> object:
        if not _passes and torch._C._current_graph_task_id() == -1:
            raise UnsupportedError(
                f"{class_name(self)} was called by itself: only a pass of the whole model on a ring gathers its "
                "weights and splits its tokens. Compute from the logits of model(**batch) without labels, or from "
                "weights made whole, weight.full_tensor() (docs/loop.md)"
            )
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
