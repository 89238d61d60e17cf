"""Layers with a state or a convolution, as the base sees them; ``ringspan.torch.engine.recurrence`` computes them."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core import mechanisms
from ringspan.core.errors import UnsupportedError
from ringspan.core.step_config import StepConfig
from ringspan.torch.model.layers.modules import class_name
from ringspan.torch.model.layers.view import ModelView, RingModel
from ringspan.torch.model.mechanism import Mechanism
from ringspan.torch.model.recurrent import hook_stateful, refuse_spans, stateful_modules
from ringspan.torch.runtime.mesh import tensor_axis


class StatesMechanism(Mechanism):
    name = mechanisms.STATES

    def found_in(self, view: ModelView, config: StepConfig) -> str:
        return "layers with a state or a convolution" if view.stateful else ""

    def refuse(self, view: ModelView, config: StepConfig, mesh: DeviceMesh) -> None:
        if not view.stateful:
            return
        tp = tensor_axis(mesh)
        ranks = mesh.get_group("ring").size()
        refuse_spans(view, config.layout, ranks, 1 if tp is None else tp.size())
        if config.compile is not False:
            raise UnsupportedError(
                f"compile={config.compile!r}: {type(view.decoder).__name__} has layers with a state or a convolution; "
                "use compile=False"
            )

    def no_tp(self, decoder: nn.Module) -> str:
        return (
            "layers with states have no tensor-parallel plan; use tp=1"
            if stateful_modules(decoder)
            else ""
        )

    def prepare(
        self, view: ModelView, config: StepConfig, mesh: DeviceMesh
    ) -> list[nn.Module]:
        hook_stateful(view.stateful.values())
        return []

    def attributes(self, view: ModelView) -> dict[str, Any]:
        return {"ring_stateful": bool(view.stateful)}

    def refuse_cached(self, model: RingModel, mask: Tensor | None) -> None:
        if mask is not None and model.ring_stateful and not bool(mask.all()):
            raise UnsupportedError(
                f"attention_mask with padding: states of {class_name(model)} would take it in; give prompts of one "
                "length in a batch, or one at a time"
            )
