"""A Hugging Face model's parts, which ``ringspan.torch.model.view`` finds once, where the model comes in."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelView:
    """The parts that checks and changes of a model ask for."""

    model: PreTrainedModel
    decoder: PreTrainedModel
    """From tokens to hidden states, the text's in a multimodal model; the model itself if it has none inside."""
    layers: dict[str, nn.Module]
    """The decoder's layers by their paths in it: units of checkpointing and gathering."""
    stateful: dict[str, nn.Module]
    """The decoder's modules whose recurrence or convolution is computed over spans, by their paths in it."""
    own_attention: dict[nn.Module, type[Any]]
    """Modules with attention in their own code, and the mixins that move it to the ring."""
    head: nn.Module | None
    """Output embedding; None if the model ends in hidden states."""
    is_classifier: bool
    """True if it maps sequences or tokens to labels by one linear layer after its decoder."""
    inner: PreTrainedModel
    """The model below the head, with towers and decoder."""
    towers: tuple[PreTrainedModel, ...]
    """Models other than the decoder, for images or sound."""

    @property
    def name(self) -> str:
        """The model's class, as errors name it."""
        return type(self.model).__name__
