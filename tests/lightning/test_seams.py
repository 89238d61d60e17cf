"""The private names of Lightning that the strategy relies on: one that a release moves is named here."""

import inspect
from importlib import import_module

import pytest

pytest.importorskip("lightning", reason="needs ringspan[lightning]")

from ringspan.lightning import seams


@pytest.mark.parametrize("place", seams.SOURCE)
def test_the_installed_release_has_every_seam(place):
    module, _, name = place.partition(":")
    source = inspect.getsource(getattr(import_module(module), name))
    for text in seams.SOURCE[place]:
        assert text in source, f"{place}: {text}"
