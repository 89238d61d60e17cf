"""Log-probabilities of the targets of a batch, for evaluation, preference losses and policy gradients."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.tasks.causal_lm import Asked, RingCausalLM


def token_logprobs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The log-probability of each target of a batch, on every rank of its ring, in the order of the whole batch.

    Equals, for the whole batch on one process,

        logits = model(input_ids, attention_mask, position_ids).logits.float()
        targets = shift_labels or labels, shifted                       # (B, S), -100 for none
        where(targets == -100, 0, log_softmax(logits, -1).gather(-1, targets))

    without whole logits: they are computed in the blocks of the loss, again in backward. Entry i belongs to the target
    of token i, which is token i + 1. Tokens without a target (a masked one, padding, the last) have 0, so that a sum
    over a row is the log-probability of what is not masked.

    Differentiable. Each rank of a ring goes on with the same numbers to the same value, whose gradients are then
    counted once, as with the loss. Each replica has its own rows; gradients are summed over replicas, so a mean over
    all examples divides by the number on all replicas. What training adds to its loss (``z_loss``,
    ``label_smoothing``, the auxiliary loss of routers) is left out.

    Args:
        model: what ``parallelize`` returned.
        batch: what ``shard_batch`` returned for ``labels`` or ``shift_labels``.

    Returns:
        (B, S) in float32 (float64 for a model of float64), S the tokens of each sequence before ``shard_batch``.

    Raises:
        UnsupportedError: a model that is on no ring; a batch without targets, or with what ``shard_batch`` does not
            return. The batch's errors are raised on every rank, as those of a forward pass.
        PeerMismatch: the ranks were given different batches, or some of them do something else.
    """
    if not isinstance(model, nn.Module) or not any(isinstance(part, RingCausalLM) for part in model.modules()):
        raise UnsupportedError(f"token_logprobs needs what rs.parallelize returned, got a {type(model).__name__}")
    # What is no batch raises in the model's call, where the other ranks hear of it.
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    return model(**given, ring_asked=Asked.LOGPROBS)
