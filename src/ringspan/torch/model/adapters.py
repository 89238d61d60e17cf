"""PEFT models: the inner model goes on the ring, the wrapper writes the adapter. PEFT is not imported here."""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never, TypeGuard

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.config_changes import deciding_fields
from ringspan.torch.model.consistency.calls import meeting
from ringspan.torch.model.layers.modules import forward_of, mix_in, refusing
from ringspan.torch.model.memory.sharding import settle
from ringspan.torch.model.saving import voted, whole_weights
from ringspan.torch.model.weights.base import note_base

if TYPE_CHECKING:
    from peft import PeftModel


_BASE_PREFIX: Final = "base_model.model."  # PEFT puts it before a model's names


@contextmanager
def asking_as_before() -> Iterator[None]:
    """Silence a deprecated name of transformers in PEFT, and its advice to untie weights before merging."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        warnings.filterwarnings(
            "ignore", "Model (with|has) `tie_word_embeddings=True`", UserWarning
        )
        warnings.filterwarnings(
            "ignore", "Input and output embeddings are no longer tied", UserWarning
        )
        yield


def is_peft(model: object) -> "TypeGuard[PeftModel]":
    return any(
        kind.__module__.partition(".")[0] == "peft" and kind.__name__ == "PeftModel"
        for kind in type(model).__mro__
    )


def base_of(model: object) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or the model; UnsupportedError for more than weights."""
    inner: Any = model.get_base_model() if is_peft(model) else model
    if not is_peft(model):
        return inner
    for name, config in model.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise UnsupportedError(
                f"the adapter {name!r} ({kind}) puts tokens before the sequence, which the ring does not support; use "
                "LoRA or IA3"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedError(
                f"the adapter {name!r} has alora_invocation_tokens, not supported yet; use plain LoRA"
            )
    tuner = model.base_model
    plain = sys.modules["peft.tuners.tuners_utils"].BaseTuner
    if forward_of(tuner) is not plain.forward:
        raise UnsupportedError(
            f"{type(tuner).__name__} does more than call the model (its loss, its hidden states), which the ring does "
            "not support; use LoRA or IA3"
        )
    return inner


def adapter_facts(model: nn.Module) -> dict[str, str]:
    """Return the adapters' numbers and switches, which weights do not show."""
    configs = model.peft_config if is_peft(model) else {}
    return {
        f"{option} of the adapter {name!r}": str(
            deciding_fields(value) if isinstance(value, dict) else value
        )
        for name, config in configs.items()
        for option, value in sorted(config.to_dict().items())
        if isinstance(value, int | float | dict)
        and option not in ("auto_mapping", "inference_mode")
    }


def put_on_ring(model: Any) -> None:
    """Let a PEFT model on a ring save itself, and refuse changes to its weights."""
    mix_in(model.base_model, _Frozen)
    mix_in(model, _RingPeft)


def _refuse(name: str, advice: str) -> Callable[..., Never]:
    return refusing(
        f"{name} is not for a model on a ring, whose weights are split; {advice}"
    )


class _Frozen:
    merge_and_unload = _refuse(
        "merge_and_unload",
        "save_pretrained, and merge in one process: docs/adapters.md",
    )
    merge_adapter = _refuse(
        "merge_adapter", "save_pretrained, and merge in one process: docs/adapters.md"
    )
    unmerge_adapter = _refuse("unmerge_adapter", "do it before parallelize")
    unload = _refuse("unload", "use disable_adapter() to go without")
    add_adapter = _refuse("add_adapter", "do it before parallelize")
    load_adapter = _refuse("load_adapter", "do it before parallelize")
    delete_adapter = _refuse("delete_adapter", "do it before parallelize")
    add_weighted_adapter = _refuse("add_weighted_adapter", "do it before parallelize")


class _RingPeft(_Frozen):
    def named_parameters(
        self: Any, *args: object, **kwargs: object
    ) -> Iterator[tuple[str, nn.Parameter]]:
        settle(self.get_base_model())
        return super().named_parameters(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def save_pretrained(
        self: Any,
        save_directory: str | os.PathLike[str],
        *args: object,
        **kwargs: object,
    ) -> None:
        """Write an adapter folder as ``PeftModel.save_pretrained`` does, weight by weight; every rank calls it.

        UnsupportedError for a conversion of initialised adapters; PeerMismatch on other ranks if rank 0 could not
        write.
        """
        save: Any = super().save_pretrained  # pyright: ignore[reportAttributeAccessIssue]
        given = inspect.signature(save).bind(save_directory, *args, **kwargs).arguments
        if given.get("path_initial_model_for_weight_conversion") is not None:
            raise UnsupportedError(
                "path_initial_model_for_weight_conversion is not for a model on a ring; save it without, and convert "
                "the folder in one process"
            )
        state = kwargs.pop("state_dict", None)
        if state is None:
            state = adapter_weights(self, given)
        is_writer = dist.get_rank() == 0

        def write() -> None:
            if is_writer:
                save(save_directory, *args, state_dict=state, **kwargs)
                note_bases(self, Path(save_directory), given.get("selected_adapters"))

        voted(self, "the end of saving the adapter", write)


def note_bases(model: Any, folder: Path, selected: Iterable[str] | None = None) -> None:
    """Record the base's weights in each adapter's folder that ``save_pretrained`` has just written."""
    for name in selected or model.peft_config:
        note_base(folder if name == "default" else folder / name, base_of(model))


def adapter_weights(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that PEFT's ``save_pretrained`` writes, whole on rank 0; all ranks call it."""
    return whole_weights(
        model, lambda sharded: _names_that_peft_saves(model, sharded, given)
    )


def names_of_adapter(
    model: Any, adapter: str, tensors: Mapping[str, Any]
) -> dict[str, str]:
    """Return, by its name in PEFT's file of an adapter, the name of each tensor in the wrapped model; collective."""
    base: Any = base_of(model)
    mesh, names = base.ring_mesh, dict[str, str]()
    # The first rank chooses, since PEFT may ask the Hub whether the vocabulary has grown.
    with meeting(mesh, "choosing what to hand over"):
        if dist.get_rank() == int(mesh.mesh.min()):
            select = sys.modules["peft.utils.save_and_load"].get_peft_model_state_dict
            state = {_BASE_PREFIX + name: tensor for name, tensor in tensors.items()}
            own = {id(tensor): name for name, tensor in tensors.items()}
            chosen = select(model, state_dict=state, adapter_name=adapter)
            names = {name: own[id(tensor)] for name, tensor in chosen.items()}
    return gather_over(mesh, names)[0]


def _names_that_peft_saves(
    model: "PeftModel", state: Mapping[str, Any], given: Mapping[str, Any]
) -> list[str]:
    """Return the names of the weights that PEFT saves for the selected adapters.

    PEFT's ``get_peft_model_state_dict`` renames what it selects, so the weights are found again by identity.
    """
    select = sys.modules["peft.utils.save_and_load"].get_peft_model_state_dict
    embeddings = given.get(
        "save_embedding_layers",
        given.get("kwargs", {}).get("save_embedding_layers", "auto"),
    )
    kept: set[int] = set()
    for name in given.get("selected_adapters") or model.peft_config:
        chosen = select(
            model,
            state_dict=dict(state),
            adapter_name=name,
            save_embedding_layers=embeddings,
        )
        kept |= set(map(id, chosen.values()))
    return [name for name, weight in state.items() if id(weight) in kept]
