"""Auxiliary loss of mixtures of E experts over all tokens of all ranks; same as ``load_balancing_loss_func``.

    loss = E * sum_e (n_e / R) (p_e / R)

n_e counts the tokens sent to expert e, p_e sums the router's probabilities for it, over R real tokens times layers of
the whole batch. Both are summed over ranks first: the loss is not a mean of per-rank losses.
Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from ringspan.core.errors import UnsupportedError
from ringspan.torch.data.batch_layout import BatchLayout
from ringspan.torch.engine.attention.traced import ends_of
from ringspan.torch.engine.transport.collectives import Sum
from ringspan.torch.model.layers.blockwise.blocks import RouterRecorder
from ringspan.torch.model.layers.blockwise.head import input_size, output_size
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.modules import class_name, instead
from ringspan.torch.model.layers.view import ModelView, RingModel

_COEFFICIENTS: Final = ("router_aux_loss_coef", "aux_loss_coef")


class RouterLoss(NamedTuple):
    """Auxiliary loss of a model: its experts, experts per token, and the attribute with its factor."""

    num_experts: int
    num_chosen: int
    coefficient: str
    recorder: RouterRecorder

    def __call__(
        self,
        scores: Sequence[Tensor],
        real: Tensor,
        groups: Sequence[dist.ProcessGroup],
    ) -> Tensor:
        """Return the loss of all ranks from layers' local scores (T, E) and real tokens (T,); its gradient is local."""
        if not scores:
            raise UnsupportedError(
                "output_router_logits=True: no layer of this model has a router; leave it out"
            )
        weights = real.to(torch.float32).unsqueeze(1)
        chosen = scores[0].new_zeros(self.num_experts, dtype=torch.float32)
        probabilities = chosen.clone()
        for layer in scores:
            each = torch.softmax(layer.flatten(0, -2), dim=-1)
            experts = each.topk(self.num_chosen, dim=-1).indices
            counts = torch.zeros_like(chosen).scatter_add(
                0, experts.flatten(), weights.expand_as(experts).flatten()
            )
            # Each layer is counted from 0, because adding ones in float32 stops at 2^24.
            chosen = chosen + counts
            probabilities = probabilities + (each.float() * weights).sum(0)
        rows = weights.sum().view(1) * len(scores)
        # One message for all three. The counts come from a choice of experts, so they have no gradient.
        total = Sum.apply(torch.cat((probabilities, chosen, rows)), list(groups))
        probabilities, chosen, rows = total.split(
            (self.num_experts, self.num_experts, 1)
        )
        return self.num_experts * ((chosen / rows) * (probabilities / rows)).sum()


def find_router_loss(view: ModelView) -> RouterLoss | None:
    """Return the auxiliary loss if the model's own forward adds the same on made-up scores, otherwise None."""
    model = view.model
    coefficient = next((name for name in _COEFFICIENTS if hasattr(model, name)), None)
    experts, chosen = (
        getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok")
    )
    if (
        coefficient is None
        or not isinstance(experts, int)
        or not isinstance(chosen, int)
    ):
        return None
    loss = RouterLoss(experts, chosen, coefficient, RouterRecorder(experts))
    # Models with the same attributes may compute another loss, so it is compared.
    return loss if _agrees(view, loss) else None


def no_router_loss(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"output_router_logits=True: {name} adds no load-balancing loss of its routers to its loss; leave it out"
    )


def refuse_router_loss(view: ModelView) -> None:
    """Raise UnsupportedError for a config that asks for routers' loss in a model without loss."""
    if getattr(view.decoder.config, "output_router_logits", False):
        raise UnsupportedError(
            f"{view.name}: output_router_logits=True has no loss to be added to; set it to False"
        )


def wanted_router(model: RingModel, asked: bool | None) -> RouterLoss | None:
    """Return the auxiliary loss if the caller, else the config, asks for it; UnsupportedError without."""
    if not (
        getattr(text_config(model.config), "output_router_logits", False)
        if asked is None
        else asked
    ):
        return None
    if model.ring_router is None:
        raise no_router_loss(class_name(model))
    if model.ring_folds > 1:
        raise UnsupportedError(
            "output_router_logits=True: the routers' loss is one of all tokens, which folds do not see at once; use "
            "folds=1, or leave it out"
        )
    if model.ring_compiled:
        raise UnsupportedError(
            "output_router_logits=True: compiled layers do not show their routers' scores; use compile=False"
        )
    return model.ring_router


def record_routers(decoder: nn.Module, loss: RouterLoss) -> None:
    wanted: Any = (getattr(decoder, "_can_record_outputs", None) or {}).get(
        "router_logits", []
    )
    for spec in wanted if isinstance(wanted, list) else [wanted]:
        kind, index = getattr(spec, "target_class", spec), getattr(spec, "index", 1)
        inside = getattr(spec, "layer_name", None)
        for path, module in decoder.named_modules():
            if isinstance(module, kind) and (
                inside is None or f".{inside.strip('.')}." in f".{path}."
            ):
                loss.recorder.attach(module, index)


@torch.compiler.disable()
def real_tokens_of(
    model: RingModel, positions: Tensor, length: int, document_lengths: Tensor | None
) -> Tensor:
    """Return the mask (B, T) of local tokens within their documents: not padding of the layout."""
    ring = model.ring_axis
    split = BatchLayout.of(
        model.ring_layout,
        ring.size() * positions.shape[1],
        ring.size(),
        document_lengths,
    )
    everywhere = split.positions(ring.get_local_rank()).to(positions.device)
    ends: Any = length if document_lengths is None else ends_of(document_lengths)
    return (everywhere < ends).expand(positions.shape)


@torch.no_grad()
def _agrees(view: ModelView, loss: RouterLoss) -> bool:
    """Return True if the model's own forward adds this auxiliary loss, compared on made-up scores of two layers."""
    model, decoder, head = view.model, view.decoder, view.head
    assert head is not None, "of models that predict tokens"
    size, vocabulary = input_size(head), output_size(head)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (1, 5), generator=generator)
    # The outputs of decoder and head are made up: only the loss runs, and weights may be on the meta device.
    hidden, logits = torch.zeros(1, 5, size), torch.zeros(1, 5, vocabulary)
    scores: Any = tuple(
        torch.randn(5, loss.num_experts, generator=generator) for _ in range(2)
    )
    output = MoeModelOutputWithPast(last_hidden_state=hidden, router_logits=scores)
    call = partial(model, input_ids=tokens, labels=tokens)
    try:
        with (
            instead(decoder, lambda *_, **__: output),
            instead(head, lambda *_, **__: logits),
        ):
            found, plain = (
                call(output_router_logits=True),
                call(output_router_logits=False),
            )
        ours = loss(scores, torch.ones(5, dtype=torch.bool), [])
        expected = plain.loss + getattr(model, loss.coefficient) * ours
        return torch.allclose(found.aux_loss, ours) and torch.allclose(
            found.loss, expected
        )
    except Exception:  # The model computes its loss from something else.
        return False
