"""All mechanisms, in the order that the base asks them in."""

from typing import Final

from ringspan.torch.mechanisms.chosen_keys.mechanism import ChosenKeysMechanism
from ringspan.torch.mechanisms.folds.mechanism import FoldsMechanism
from ringspan.torch.mechanisms.media.mechanism import MediaMechanism
from ringspan.torch.mechanisms.routes.mechanism import RoutesMechanism
from ringspan.torch.mechanisms.states import StatesMechanism
from ringspan.torch.mechanisms.trees.mechanism import TreesMechanism
from ringspan.torch.model.mechanism import Mechanism

MECHANISMS: Final[tuple[Mechanism, ...]] = (
    StatesMechanism(),
    ChosenKeysMechanism(),
    FoldsMechanism(),
    TreesMechanism(),
    MediaMechanism(),
    RoutesMechanism(),
)
