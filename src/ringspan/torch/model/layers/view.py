"""Parts of a Hugging Face model, found once by ``ringspan.torch.model.view``, and attributes that a ring adds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ringspan.core.names import BatchLayoutName
from ringspan.core.step_config import StepConfig
from ringspan.torch.data.loss_blocks import LossOptions
from ringspan.torch.model.layers.family import Family

if TYPE_CHECKING:

    class _Model(PreTrainedModel, FSDPModule): ...
else:
    # At run time the mixin precedes whichever class the model has.
    _Model = object


@dataclass(frozen=True)
class ModelView:
    """Parts of a model that checks and changes of it need."""

    model: PreTrainedModel
    decoder: PreTrainedModel
    """Submodel from tokens to hidden states (of the text, in a multimodal model); the model itself if it has none."""
    layers: dict[str, nn.Module]
    """The decoder's layers, units of checkpointing and gathering, by their paths in it."""
    family: Family
    """Record of how the decoder's type departs from transformers' conventions."""
    stateful: dict[str, nn.Module]
    """The decoder's modules whose recurrence or convolution is computed over spans, by their paths in it."""
    own_attention: dict[nn.Module, type[Any]]
    """Modules with attention in their own code, and the mixins that move it to the ring."""
    head: nn.Module | None  # output embedding; None if the model ends in hidden states
    is_classifier: bool  # True if it maps sequences or tokens to labels by one linear layer after its decoder
    inner: PreTrainedModel  # the model below the head, with towers and decoder
    towers: tuple[PreTrainedModel, ...]
    """Models for images or sound, next to the decoder."""

    @property
    def name(self) -> str:
        return type(self.model).__name__


class RingModel(_Model):
    """Attributes that ``parallelize`` adds to a model."""

    ring_mesh: DeviceMesh
    # The mesh's ring, kept because torch would build a new mesh at each access.
    ring_axis: DeviceMesh
    ring_layout: BatchLayoutName
    ring_folds: int  # parts of each sequence that ranks compute one after the other
    ring_step: StepConfig  # the options of ``parallelize``
    ring_decoder: str  # the decoder's path; empty if the model is one
    # Configs and their fields at ``parallelize`` (``ConfigCopy``).
    ring_configs: tuple[Any, ...]
    ring_number: str  # an identity among the models of the mesh
    ring_structure: Any  # its modules and the names of their parameters (``Structure``)
    # Path, module and name of each buffer of the layers.
    ring_buffers: list[tuple[str, nn.Module, str]]
    ring_loss_function: Callable[..., Any]  # the model's own at ``parallelize``
    ring_is_generating = False  # True while weights may be whole between passes
    # Kind of the model's image inputs (``Kind``); None if it takes no images.
    ring_media: Any = None

    # Longest text in training beyond the model's positions (``note_length``).
    ring_trained_length: int | None
    ring_said_text_length: bool
    # True once a log line has told what evaluation mode leaves out.
    ring_said_evaluation = False
    ring_loss: LossOptions
    # Vocabulary sizes of the input embedding and the head.
    ring_vocabularies: tuple[int, int]
    # Token that the model's own forward skips when counting positions.
    ring_skipped: int | None
    # Modules between hidden states and logits; empty if it is only the output embedding.
    ring_head_parts: tuple[str, ...] = ()
    ring_head: Any  # kind of head tried out last
    ring_stateful: bool  # True if layers have states or convolutions
    # Shortest common prefix, in tokens, that a trainer's rows share; None if rows share nothing.
    ring_min_shared: int | None
    # All mechanisms (``ringspan.torch.model.mechanism.Mechanism``), which a pass asks one after the other.
    ring_mechanisms: tuple[Any, ...]
    # What the model has of mechanisms that act in every pass, by their names (``Mechanism.found_in``).
    ring_found: dict[str, str]
    ring_compiled: bool  # True if layers are compiled
    # Auxiliary loss of a mixture of experts (``RouterLoss``); None if absent.
    ring_router: Any
    # Experts of each mixture, 0 without any, and the decoder's layers, which routes name.
    ring_experts: int
    ring_routed_layers: int


def decoder_on_ring(model: RingModel) -> PreTrainedModel:
    decoder: Any = model.get_submodule(model.ring_decoder)
    return decoder
