"""TRL's ORPO; it is experimental, and importing it warns."""

from typing import Any

from torch import Tensor
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ringspan.hf.trainer import RingTrainerMixin
from ringspan.torch.model.adapters import base_of


class RingORPOTrainer(RingTrainerMixin, ORPOTrainer):
    """TRL's ``ORPOTrainer`` on a ring, without whole logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_fused_lm_head(base_of(self.model), outputs=("log_probs", "mean_logits"))

    def concatenated_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self: Any, model: Any, batch: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Return TRL's results for whole logits (2B, S, V), from log-probabilities (2B, S).

        Logits become their means over the vocabulary, of real tokens: they are only averaged.
        """
        both = self.concatenated_inputs(
            batch, padding_value=self.padding_value, device=self.accelerator.device
        )
        ids, mask = both["concatenated_input_ids"], both["concatenated_attention_mask"]
        asked = {"output_router_logits": True} if self.aux_loss_enabled else {}
        out = model(
            input_ids=ids,
            attention_mask=mask,
            # Prompts have labels too, for the first of ORPO's losses.
            labels=ids.masked_fill(mask == 0, -100),
            use_cache=False,
            fused_lm_head=True,
            **asked,
        )
        answers = both["concatenated_labels"][:, 1:] != -100
        averages = (out.log_probs * answers).sum(-1) / answers.sum(-1)
        chosen = len(batch["chosen_labels"])
        likelihood = -out.log_probs[:chosen].sum() / out.label_mask[:chosen].sum()
        means = [
            out.mean_logits[rows][out.label_mask[rows]]
            for rows in (slice(chosen), slice(chosen, None))
        ]
        result = (averages[:chosen], averages[chosen:], *means, likelihood)
        return (*result, out.aux_loss) if self.aux_loss_enabled else result
