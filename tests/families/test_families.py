"""Families: who serves a model type, what is refused, and what packages bring."""

from importlib.metadata import EntryPoint

import pytest
from transformers import AutoConfig

import ringspan as rs
from ringspan import families
from ringspan.core import packages
from ringspan.families import Family, LayerMask, family_of
from ringspan.torch.model.layers import family as registry
from ringspan.torch.model.layers.decoder import layer_kinds

MINE = Family(name="Mine", types=("mine",))


@pytest.fixture(autouse=True)
def as_before():
    yield
    registry._registered.clear()
    registry._installed.cache_clear()


def test_most_types_need_no_family():
    assert family_of(AutoConfig.for_model("llama")) == registry.CONVENTIONS
    assert family_of(AutoConfig.for_model("bloom")).name == "BLOOM"


def test_each_family_is_of_this_file_and_of_no_other():
    seen: dict[str, str] = {}
    for family in registry._built_in():
        for kind in family.types:
            assert kind not in seen, f"{kind}: {family.name} and {seen[kind]}"
            seen[kind] = family.name
    assert len(seen) > 40


def test_a_family_takes_the_place_of_another_only_if_asked():
    families.register(MINE)
    families.register(MINE)  # twice is once
    other = Family(name="Other", types=("mine",))
    with pytest.raises(
        rs.ConfigError, match="served by family 'Mine'; register it with replace=True"
    ):
        families.register(other)
    assert families.register(other, replace=True) is registry.families()["mine"]


def test_a_type_of_this_package_can_be_replaced():
    windowed = Family(
        name="Windows",
        types=("llama",),
        layer_masks=lambda config: [LayerMask(window=4)] * config.num_hidden_layers,
    )
    families.register(windowed)
    config = AutoConfig.for_model("llama", num_hidden_layers=2)
    assert layer_kinds(config) == (LayerMask(window=4),) * 2


@pytest.mark.parametrize(
    ("family", "says"),
    [
        (Family(name="Nothing"), "serves no model type; give types="),
        ({"name": "Mine"}, "register takes a ringspan.families.Family, got dict; make"),
        (Family(name="My BLOOM", types=("bloom",)), "served by family 'BLOOM'"),
    ],
)
def test_what_is_no_family_of_a_free_type_is_refused(family, says):
    with pytest.raises(rs.ConfigError, match=says):
        families.register(family)


def brought(monkeypatch, value: str) -> None:
    point = EntryPoint("mine", value, "ringspan.families")
    monkeypatch.setattr(packages, "entry_points", lambda group: [point])
    registry._installed.cache_clear()


@pytest.mark.parametrize("name", ["MINE", "SEVERAL"])
def test_packages_bring_families(monkeypatch, name):
    brought(monkeypatch, f"{__name__}:{name}")
    assert registry.families()["mine"] == MINE


SEVERAL = [MINE, Family(name="Other", types=("other",))]
NUMBER = 3


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:FAMILY", "cannot be loaded .*update or uninstall"),
        (f"{__name__}:NUMBER", "is no Family, nor a list of them"),
    ],
)
def test_an_entry_that_is_wrong_names_itself(monkeypatch, value, says):
    brought(monkeypatch, value)
    with pytest.raises(rs.ConfigError, match=says):
        registry.families()
