"""Keys that an index chooses, as the base sees them."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core import mechanisms
from ringspan.core.errors import UnsupportedError
from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.core.step_config import StepConfig
from ringspan.torch.mechanisms.chosen_keys.choice import (
    CHOICES,
    Asked,
    AskedOfCache,
    choice_of,
)
from ringspan.torch.mechanisms.chosen_keys.index_loss import begin_to_learn, learnt
from ringspan.torch.mechanisms.chosen_keys.modules import (
    choosing_modules,
    parts_to_send,
    refuse_indexed,
    take_over_index,
)
from ringspan.torch.model.attention.call import AttentionCall
from ringspan.torch.model.attention.latents import route_of
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import ModelView, RingModel
from ringspan.torch.model.local_pass import LocalPass
from ringspan.torch.model.mechanism import Attends, Mechanism
from ringspan.torch.runtime.mesh import tensor_axis


class ChosenKeysMechanism(Mechanism):
    name = mechanisms.CHOSEN_KEYS

    def found_in(self, view: ModelView, config: StepConfig) -> str:
        return (
            "layers with an index that chooses keys"
            if choosing_modules(view.decoder)
            else ""
        )

    def refuse(self, view: ModelView, config: StepConfig, mesh: DeviceMesh) -> None:
        tp = tensor_axis(mesh)
        refuse_indexed(view, config, 1 if tp is None else tp.size())

    def no_tp(self, decoder: nn.Module) -> str:
        return (
            "heads of layers with an index are not split yet; use tp=1"
            if choosing_modules(decoder)
            else ""
        )

    def attends(self, view: ModelView, config: StepConfig) -> Attends | None:
        if not choosing_modules(view.decoder):
            return None
        return partial(_attend, is_dense=config.index_loss == "dense")

    def prepare(
        self, view: ModelView, config: StepConfig, mesh: DeviceMesh
    ) -> list[nn.Module]:
        route = route_of(config, mesh.get_group("ring").size())
        take_over_index(
            view.decoder,
            choosing_modules(view.decoder),
            sends_latents=route.carries_latents,
        )
        return []

    def begin(self, now: LocalPass) -> None:
        begin_to_learn(now)

    def finish(self, now: LocalPass, loss: Tensor) -> Tensor:
        return learnt(now, loss)

    def refuse_cached(self, model: RingModel, mask: Tensor | None) -> None:
        if mask is None or not _pools(model):
            return
        if bool((mask.bool()[:, :-1] & ~mask.bool()[:, 1:]).any()):
            raise UnsupportedError(
                f"attention_mask with padding behind tokens: {class_name(model)} pools tokens one after the other; "
                "pad on the left"
            )

    def cached_numbers(self, decoder: nn.Module) -> int:
        modules: Any = choosing_modules(decoder)
        indexes = (
            getattr(each, "compressor", None) or each.indexer for each in modules
        )
        return sum(index.key_numbers for index in indexes if index is not None)

    def reads_all(self, model: RingModel) -> bool:
        # Windows of pooled tokens are counted from the start, whatever the layer still holds.
        return _pools(model)


def _pools(model: RingModel) -> bool:
    index = family_of(text_config(model.config)).index
    return index is not None and index.pools


def _attend(call: AttentionCall, *, is_dense: bool) -> AttentionCall:
    """Attend to the keys that the module's index has chosen, unless these are all that a query sees.

    Then the ring computes the call under a causal mask, over latents if its route takes them.
    """
    choice = choice_of(call.further, call.mask)
    further = {
        name: value for name, value in call.further.items() if name not in CHOICES
    }
    call = replace(call, mask=None, further=further)
    if choice is None:
        return call
    if call.turn is None and choice.is_of_everything:
        key, value = parts_to_send(call.module, call.query, call.key, call.value)
        return replace(call, key=key, value=value, kind=CAUSAL)
    assert call.scale is not None, "a module with an index gives its own"
    if call.turn is not None:
        asked = AskedOfCache(call.turn, call.scale, call.sinks)
    else:
        rows = call.rows_under(CAUSAL)
        asked = Asked(rows, call.ring, call.scale, call.sinks, is_dense)
    qkv = call.query, call.key, call.value
    return replace(call, compute=partial(choice.attend, call.module, qkv, asked))
