"""Mechanisms: what some models and batches add to plain attention, each in one object that the base asks.

The base knows texts and documents, attention and feed-forwards. Keys that an index chooses, layers with a state, images
and sound, folds and trees are mechanisms. ``ringspan.torch.mechanisms.every`` lists them; ``parallelize`` keeps the
list with the model, and ``shard_batch``, a pass and generation go through it and name no mechanism.
``ringspan.core.mechanisms`` says which do not go together.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.step_config import StepConfig
from ringspan.torch.data.batch import Sharding
from ringspan.torch.model.layers.view import ModelView, RingModel

if TYPE_CHECKING:
    from ringspan.torch.model.attention.call import AttentionCall
    from ringspan.torch.model.local_pass import LocalPass


class Attends(Protocol):
    """Function that computes some calls of attention in place of the ring."""

    def __call__(self, call: "AttentionCall") -> "AttentionCall":
        """Return the call with what computes it, or with other keys, values or mask for the ring."""
        ...


class Mechanism:
    """One mechanism, as the base sees it; a method that is not overridden adds nothing.

    Methods that raise do so before the ranks exchange anything: the base tells the other ranks.
    """

    name: ClassVar[str]
    """One of ``ringspan.core.mechanisms.NAMES``."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a whole batch that ``shard_batch`` hands to this mechanism."""
    of_tokens: ClassVar[Mapping[str, int]] = {}
    """Keys among these with an entry (B, S, ...) for each token, cut as labels are, and their padding."""

    # parallelize

    def found_in(self, view: ModelView, config: StepConfig) -> str:
        """Describe for errors what a model or an option has of this mechanism; empty if nothing."""
        return ""

    def refuse(self, view: ModelView, config: StepConfig, mesh: DeviceMesh) -> None:
        """Raise for what this mechanism does not support of a model and its options; change nothing."""

    def no_tp(self, decoder: nn.Module) -> str:
        """Return why tensor parallelism cannot split a decoder's layers, with the remedy; empty if it can."""
        return ""

    def attends(self, view: ModelView, config: StepConfig) -> Attends | None:
        """Return what computes attention in place of the ring in a decoder's layers; None if nothing does."""
        return None

    def prepare(
        self, view: ModelView, config: StepConfig, mesh: DeviceMesh
    ) -> list[nn.Module]:
        """Change the model's modules in place, before FSDP; return further units of it."""
        return []

    def attributes(self, view: ModelView) -> dict[str, Any]:
        """Return attributes of ``RingModel`` that the model gets."""
        return {}

    # shard_batch

    def found_in_batch(self, batch: Mapping[str, Any], how: Sharding) -> str:
        """Describe for errors what a whole batch has of this mechanism; empty if nothing."""
        return ", ".join(sorted(self.keys & set(batch)))

    def shard(self, batch: Mapping[str, Any], how: Sharding) -> dict[str, Any] | None:
        """Return this rank's part of a batch that the mechanism splits in its own way; None if it has rows."""
        return None

    def added(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return what this rank's part of a batch of rows gets besides tokens, and its numbers in the digest."""
        return {}, []

    # A pass

    def check(self, model: RingModel, batch: Mapping[str, Any]) -> None:
        """Raise for a local batch that this mechanism cannot compute in a model."""

    def runs(self, model: RingModel) -> Callable[..., Any] | None:
        """Return what runs a whole pass, ``run(model, call, arguments)``, in place of one call; None if nothing."""
        return None

    def begin(self, now: "LocalPass") -> None:
        """Take part in a pass: note in ``now`` what the layers read, or what runs the decoder."""

    def finish(self, now: "LocalPass", loss: Tensor) -> Tensor:
        """Return the loss of a pass with what this mechanism adds to it."""
        return loss

    # Generation

    def refuse_cached(self, model: RingModel, mask: Tensor | None) -> None:
        """Raise for an ``attention_mask`` (B, S) that this mechanism does not compute over a cache."""

    def cached_numbers(self, decoder: nn.Module) -> int:
        """Return how many numbers of each token a cache keeps besides keys and values."""
        return 0

    def reads_all(self, model: RingModel) -> bool:
        """Return True if layers count the tokens of a cache from the first one, whatever their masks still show."""
        return False
