"""Weights that several layers share, and copies of them for an adapter that changes these layers differently.

The head of a tied model multiplies by its embedding's weight. Merging an adapter of one of them into the weight would
change the other as well, so each gets its own copy first.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def untie(model: nn.Module) -> None:
    """Give each name of a shared parameter its own copy."""
    for names in tied_names(model):
        for name in names[1:]:
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            parameter = module._parameters[own]
            assert parameter is not None, "it is named"
            copy = parameter.detach().clone()
            module._parameters[own] = nn.Parameter(
                copy, requires_grad=parameter.requires_grad
            )


def settle_ties(model: PreTrainedModel, tied: list[list[str]]) -> None:
    """Share the parameters of these names again if all are still equal; otherwise share no weight of the model."""
    for first, *others in tied:
        kept = model.get_parameter(first)
        if not all(torch.equal(kept, model.get_parameter(name)) for name in others):
            untie(model)
            note_untied(model.config)
            return
    for first, *others in tied:
        for name in others:
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._parameters[own] = model.get_parameter(first)
    # PEFT unsets it when it merges an adapter into a copy.
    model.config.tie_word_embeddings = True


def note_untied(config: PreTrainedConfig) -> None:
    """Set tie_word_embeddings to False in the configs of a model and its parts."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    for each in (config, *parts):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
