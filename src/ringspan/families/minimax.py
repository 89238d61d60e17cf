"""MiniMax: lightning attention, a linear attention with a state that decays by head."""

from typing import Any, Final

from torch import Tensor

from ringspan.core.recurrence.cost import Scan
from ringspan.torch.engine.recurrence import rules
from ringspan.torch.engine.recurrence.current import current_pass
from ringspan.torch.engine.recurrence.functions import StateFunction
from ringspan.torch.engine.recurrence.recurrence import recurrence
from ringspan.torch.model.layers.family import Family
from ringspan.torch.model.recurrent import OwnState


def _cost(of: Any) -> Scan:
    """Count per head, in a block of c tokens: queries by keys, scores by values (4 c K), the state (4 K K)."""
    heads, size, block = of.num_attention_heads, of.head_dim, of.block_size
    state = heads * size * size
    return Scan(
        state=state,
        map_=heads,
        flops=heads * (4 * block * size + 4 * size * size),
        out=heads * size,
        chunk_states=state / block,
    )


class _Lightning(OwnState):
    ring_state = StateFunction(rules.Lightning(), _cost)

    def forward(
        self: Any, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Return lightning attention of tokens (B, T, C), with the state passed from rank to rank; no weights.

            S_t = exp(-slope) S_(t-1) + k_t^T v_t,   o_t = q_t S_t     for each head

        Outside a pass over a ring it calls the module's own forward.
        """
        sequences = current_pass()
        if sequences is None:
            return super().forward(hidden_states, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if sequences.packed is not None:
            sequences.packed.is_seen = True
        batch, tokens, _ = hidden_states.shape
        heads, size = self.num_attention_heads, self.head_dim
        made = (
            self.act_fn(self.qkv_proj(hidden_states))
            .view(batch, tokens, heads, 3 * size)
            .transpose(1, 2)
        )
        q, k, v = made.split(size, -1)
        arguments = {
            "query": q,
            "key": k,
            "value": v,
            "slopes": self.slope_rate.flatten(),
        }
        options = {"block_tokens": self.block_size}
        out = recurrence(
            self.ring_state.rule,
            rules.lightning_attention,
            arguments | options,
            sequences,
        )
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, heads * size))
        return self.out_proj(self.output_gate(hidden_states).sigmoid() * out), None


FAMILIES: Final = (
    Family(
        name="MiniMax",
        types=("minimax",),
        stateful={"MiniMaxLightningAttention": _Lightning},
    ),
)
