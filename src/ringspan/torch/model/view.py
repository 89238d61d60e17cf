"""The parts of a Hugging Face model, found once."""

from torch import nn
from transformers import PreTrainedModel

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.attention.own import own_attention
from ringspan.torch.model.layers.decoder import (
    decoder_of,
    inner_of,
    layers_of,
    towers_of,
)
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import ModelView
from ringspan.torch.model.recurrent import stateful_modules

SEQUENCES, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
LABELS = "score"  # the head of a classifier


def view_of(model: PreTrainedModel) -> ModelView:
    """Find the parts of a model; UnsupportedError if it is not a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is no PreTrainedModel of transformers; give the model inside of it "
            "(model.module), and compile afterwards"
        )
    decoder = decoder_of(model)
    return ModelView(
        model=model,
        decoder=decoder,
        layers=layers_of(decoder),
        family=family_of(decoder.config),
        stateful=stateful_modules(decoder),
        own_attention=own_attention(decoder),
        head=model.get_output_embeddings(),
        is_classifier=is_classifier(model),
        inner=inner_of(model),
        towers=tuple(towers_of(model)),
    )


def is_classifier(model: nn.Module) -> bool:
    """Return True if a model maps sequences or tokens to labels by one linear layer after its decoder."""
    return (
        isinstance(model, PreTrainedModel)
        and class_name(model).endswith((SEQUENCES, _TOKENS))
        and isinstance(getattr(model, LABELS, None), nn.Module)
    )
