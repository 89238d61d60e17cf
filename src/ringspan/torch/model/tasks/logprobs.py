"""Log-probabilities of a batch's targets, for evaluation, preference losses and policy gradients."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.tasks.causal_lm import Asked, RingCausalLM


def token_logprobs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the log-probability of each target of a batch, on every rank of its ring, in the whole batch's order.

    Equals, for the whole batch on one process but without whole logits,

        logits = model(input_ids, attention_mask, position_ids).logits.float()
        targets = shift_labels or labels, shifted                       # (B, S), -100 for none
        where(targets == -100, 0, log_softmax(logits, -1).gather(-1, targets))

    Entry i belongs to the target of token i, which is token i + 1; a row's sum is the log-probability of its unmasked
    tokens. All ranks of a ring compute the same value from the result, whose gradients count once and are summed over
    replicas, which have their own rows: a mean divides by the examples of all replicas. ``z_loss``, ``label_smoothing``
    and the auxiliary router loss are left out. Of a tree of segments, entry i is of token i itself, so that the numbers
    of segment ``s`` are ``logprobs[0].split(segment_lengths)[s]``.

    Args:
        model: from ``parallelize``.
        batch: from ``shard_batch`` with ``labels`` or ``shift_labels``.

    Returns:
        (B, S) in float32 (float64 for a float64 model), S the tokens of each sequence before ``shard_batch``.

    Raises:
        UnsupportedError: a model on no ring; on every rank, a batch without targets, or not from ``shard_batch``.
        PeerMismatch: ranks were given different batches, or do something else.
    """
    if not isinstance(model, nn.Module) or not any(isinstance(part, RingCausalLM) for part in model.modules()):
        raise UnsupportedError(f"token_logprobs needs what rs.parallelize returned, got a {type(model).__name__}")
    # What is no batch raises in the model's call, where the other ranks hear of it.
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    return model(**given, ring_asked=Asked.LOGPROBS)
