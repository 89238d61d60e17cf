"""Training of the index of layers that choose their keys (DeepSeek-V3.2), which no other gradient reaches.

    loss = sum over layers of  1/R sum over R real tokens of KL(attention || softmax of the index's scores)

Probabilities of all heads are summed, normalised and not differentiated: over the keys that the index chose
(``sparse``), or over all (``dense``), which the layers then attend to. R counts the tokens of all ranks. With
``num_items_in_batch`` the loss of a batch weighs as much as its targets do. Layers that reuse another layer's choice
add nothing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.core.mechanisms import CHOSEN_KEYS
from ringspan.core.names import INDEX_LOSS_NAMES, find_name
from ringspan.core.step_config import StepConfig
from ringspan.torch.data.padding import IGNORED
from ringspan.torch.engine.recurrence.current import current_pass
from ringspan.torch.engine.transport.collectives import Sum
from ringspan.torch.mechanisms.chosen_keys.chosen import IndexInputs
from ringspan.torch.model.layers.family import families
from ringspan.torch.model.layers.view import ModelView, RingModel
from ringspan.torch.model.local_pass import LocalPass
from ringspan.torch.runtime.mesh import loss_groups


def refuse_index_loss(
    view: ModelView, config: StepConfig, modules: Sequence[nn.Module]
) -> None:
    """Raise UnsupportedError or ConfigError for a model whose index is not trained by ``config.index_loss``."""
    if (
        find_name("index_loss", config.index_loss, INDEX_LOSS_NAMES, ConfigError)
        == "none"
    ):
        return
    indexes = [
        index
        for each in modules
        if isinstance(index := getattr(each, "indexer", None), nn.Module)
    ]
    option, kind = f"index_loss={config.index_loss!r}", view.decoder.config.model_type
    if not indexes:
        raise UnsupportedError(
            f"{option}: {view.name} has no index that chooses keys; leave it out"
        )
    learning = {
        name: each.index.learns for name, each in families().items() if each.index
    }
    if not learning.get(kind):
        known = ", ".join(sorted(name for name, learns in learning.items() if learns))
        raise UnsupportedError(
            f"{option}: only indexes of {known} are trained yet, not of {kind}; leave it out"
        )
    if view.head is None or view.is_classifier:
        raise UnsupportedError(
            f"{option} is added to a loss of next tokens, of which {view.name} predicts none; leave it out"
        )
    if not any(p.requires_grad for index in indexes for p in index.parameters()):
        raise ConfigError(
            f"{option}: no parameter of an index requires gradients; set requires_grad, or leave it out"
        )


class IndexLoss:
    """Divergences of the indexes of a pass, which learn the attention of ``real`` queries (B, T), all but padding."""

    def __init__(self, real: Tensor) -> None:
        self.real = real
        self._found: list[Tensor] | None = []

    def add(self, loss: Tensor) -> None:
        if self._found is not None:
            self._found.append(loss)

    def take(self) -> list[Tensor]:
        """Return the losses added so far, once, since recomputed layers add theirs again."""
        found, self._found = self._found or [], None
        return found


def begin_to_learn(now: LocalPass) -> None:
    """Have the layers of a pass note what their indexes learn, if it trains indexes."""
    if now.wants_loss and teaches_index(now.model):
        now.notes[CHOSEN_KEYS] = IndexLoss(now.real)


def learnt(now: LocalPass, loss: Tensor) -> Tensor:
    """Return a loss with the gradient, but not the value, of what the indexes of a pass learn from."""
    learning = now.notes.get(CHOSEN_KEYS)
    if learning is None or now.targets is None:
        return loss
    added = index_loss(
        learning, now.targets.labels, now.count, loss_groups(now.model.ring_mesh)
    )
    now.outputs["index_loss"] = added.detach()
    return loss + (added - added.detach())


def teaches_index(model: RingModel) -> bool:
    """Return True if a pass trains indexes, as every pass with gradients does."""
    # Evaluation mode counts as well: ``from_pretrained`` returns models in it, and the loss has the same value.
    return model.ring_step.index_loss != "none" and torch.is_grad_enabled()


def is_learning() -> bool:
    """Return True if indexes learn in this pass, also during its recomputation without autograd."""
    return _learning_now() is not None


def learning_queries() -> Tensor | None:
    """Return the queries (B, T) of this pass that teach its indexes; None if they do not learn."""
    learning = _learning_now() if torch.is_grad_enabled() else None
    return None if learning is None else learning.real


def note_divergence(index: IndexInputs, loss: Tensor) -> None:
    learning = _learning_now()
    if index.real is not None and learning is not None:
        learning.add(loss)


def _learning_now() -> IndexLoss | None:
    now = current_pass()
    return None if now is None else now.notes.get(CHOSEN_KEYS)


def index_loss(
    learning: IndexLoss, targets: Tensor, count: int, groups: list[dist.ProcessGroup]
) -> Tensor:
    """Return the loss summed over all ranks; each rank's gradient is that of its own queries and keys."""
    total = torch.stack(learning.take()).sum()
    counts = torch.stack((learning.real.sum(), (targets != IGNORED).sum())).to(total)
    total, real, valid = Sum.apply(torch.cat((total[None], counts)), groups).unbind()
    return total / real.clamp(min=1) * valid / max(count, 1)
