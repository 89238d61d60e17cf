"""A folder's own weights for a model with few of its layers, read without the others."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import refused
from ringspan.proof.own_code import has_own_code
from ringspan.proof.seeing import language_layers, sees
from ringspan.torch.engine.transport.collectives import gather_over
from ringspan.torch.model.layers.decoder import decoder_of
from ringspan.torch.model.weights.deferred import part, region_of
from ringspan.torch.model.weights.files import WeightFiles, folder_of
from ringspan.torch.model.weights.loading import (
    auto_class,
    source_of,
    unread_model,
)
from ringspan.torch.runtime.host import host_memory_bytes

_NUMBERS: Final = 9
"""Numbers that a rank keeps for each weight: itself, its gradient, moments and a copy, and two outcomes of two each."""


@dataclass(frozen=True)
class OwnWeights:
    """Weights of a folder for a smaller model, which has its layers ``kept`` in order."""

    folder: str
    config: PreTrainedConfig
    kept: tuple[int, ...]

    @torch.no_grad()
    def fill(self, model: Any) -> None:
        """Give a small model's language model the folder's numbers; a vocabulary is cut to its first tokens.

        Towers and projectors are smaller than the folder's, and keep what they have.
        """
        layers = {
            path: self._layers[number]
            for path, number in zip(language_layers(model), self.kept, strict=True)
        }
        for name, tensor in _language_tensors(model):
            here = next((path for path in layers if name.startswith(f"{path}.")), "")
            full = layers[here] + name.removeprefix(here) if here else name
            tensor.copy_(_read(self._tensors[full], tensor))

    @cached_property
    def _model(self) -> Any:
        """The whole model, without memory."""
        where = f"--weights of {self.folder!r}"
        with refused(where, OSError, ValueError):
            folder = folder_of(self.folder)
        files = WeightFiles(Path(folder), self.config)
        model, _ = unread_model(
            where,
            folder,
            files,
            self.config,
            torch.float32,
            trust_remote_code=has_own_code(self.config),
            model_class=auto_class(self.config, sees=sees(self.config)),
        )
        return model

    @cached_property
    def _layers(self) -> list[str]:
        return [*language_layers(self._model)]

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        named = self._model.named_parameters(remove_duplicate=False)
        return {**dict(named), **dict(self._model.named_buffers())}


def _language_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's decoder and of its head; all of a model that is nothing else."""
    tensors = model.state_dict(keep_vars=True)
    if not sees(model.config):
        yield from tensors.items()
        return
    parts = decoder_of(model), model.get_output_embeddings()
    own = {
        id(tensor)
        for part in parts
        for tensor in part.state_dict(keep_vars=True).values()
    }
    for name, tensor in tensors.items():
        if id(tensor) in own:
            yield name, tensor


def _read(tensor: Tensor, like: Tensor) -> Tensor:
    """Read the first numbers of a deferred tensor, in the shape of another."""
    source = source_of(tensor)
    if source is None:
        return tensor[region_of(like.shape)]
    return part(source, region_of(like.shape))


def refuse_too_large(mesh: DeviceMesh, numbers: int, option: str) -> None:
    """Raise ConfigError on all ranks if the ranks of a host lack the memory for a model of some numbers in float64."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size()))
    needed = numbers * _NUMBERS * torch.float64.itemsize * here
    has = min(gather_over(mesh, host_memory_bytes()))
    if needed > has:
        raise ConfigError(
            f"{option}: {here} ranks take {needed / 1e9:.0f} GB for {numbers:,} weights in full width, and a host has "
            f"{has / 1e9:.0f} GB; use fewer ranks, or random weights of a small model"
        )
