"""Families of models: what sets some model types apart from transformers' conventions, a file for each.

A model of your own is registered with ``register(Family(...))`` on every rank before ``rs.parallelize``; a package
registers its own by the entry point group ``ringspan.families``, whose entries are a ``Family`` or a list of them::

    [project.entry-points."ringspan.families"]
    mine = "my_package.ring:FAMILY"
"""

from ringspan.core.geometry.layer_mask import LayerMask
from ringspan.torch.data.media.kind import Kind, Modality
from ringspan.torch.engine.recurrence.functions import StateFunction
from ringspan.torch.model.attention.own import InlineAttention, OwnAttention
from ringspan.torch.model.layers.family import (
    ChosenKeys,
    Family,
    families,
    family_of,
    register,
)
from ringspan.torch.model.recurrent import OwnState

__all__ = [
    "ChosenKeys",
    "Family",
    "InlineAttention",
    "Kind",
    "LayerMask",
    "Modality",
    "OwnAttention",
    "OwnState",
    "StateFunction",
    "families",
    "family_of",
    "register",
]
