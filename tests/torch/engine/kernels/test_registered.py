"""Kernels of one's own: registered in a script or brought by a package, and chosen by their name alone."""

from importlib.metadata import EntryPoint

import pytest
import torch

import ringspan as rs
from ringspan import kernels
from ringspan.core import packages
from ringspan.torch.engine import kernels as registry
from ringspan.torch.engine.kernels.local.eager import Eager


class Counting(Eager):
    """The plain kernel, which counts its calls."""

    def __init__(self, name: str = "counting") -> None:
        self.name, self.calls = name, 0

    def forward_into(self, *given) -> None:
        self.calls += 1
        super().forward_into(*given)


BROUGHT, SEVERAL, NUMBER = Counting("brought"), [Counting("one"), Counting("other")], 3


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry._of_packages.cache_clear()
    yield
    registry._of_packages.cache_clear()


def computed(name: str):
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    found = rs.ring_attention(q, k, v, kernel=name)
    assert torch.allclose(found, rs.ring_attention(q, k, v, kernel="eager"))


def test_a_registered_kernel_computes_where_it_is_named():
    kernel = Counting()
    kernels.register(kernel)
    computed("auto")
    assert not kernel.calls
    computed("counting")
    assert kernel.calls


def test_a_name_is_registered_once_unless_replaced():
    kernels.register(Counting())
    with pytest.raises(rs.ConfigError, match="registered already; use replace=True"):
        kernels.register(Counting())
    last = Counting()
    kernels.register(last, replace=True)
    assert kernels.known()["counting"] is last


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (Counting("eager"), "'eager' is ringspan's own; give yours another name"),
        (Counting("auto"), "'auto' is ringspan's own"),
        (3, "register takes a kernel, got int"),
        (Counting, "register takes a kernel, got type"),
    ],
)
def test_what_is_no_kernel_or_takes_a_name_is_refused(kernel, says):
    with pytest.raises(rs.ConfigError, match=says):
        kernels.register(kernel, replace=True)


def test_an_unknown_name_lists_the_known_ones():
    kernels.register(Counting())
    with pytest.raises(rs.UnsupportedError, match=r"unknown kernel 'mine'.*, counting"):
        computed("mine")


def brought(monkeypatch, value: str) -> None:
    point = EntryPoint("mine", value, "ringspan.kernels")
    monkeypatch.setattr(packages, "entry_points", lambda group: [point])


def test_packages_bring_kernels(monkeypatch):
    brought(monkeypatch, f"{__name__}:BROUGHT")
    computed("brought")
    assert BROUGHT.calls


def test_packages_bring_several_kernels(monkeypatch):
    brought(monkeypatch, f"{__name__}:SEVERAL")
    assert {"one", "other"} <= set(kernels.known())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:KERNEL", "cannot be loaded .*update or uninstall"),
        (f"{__name__}:NUMBER", "is no kernel, nor a list of them"),
    ],
)
def test_an_entry_that_is_wrong_names_itself(monkeypatch, value, says):
    brought(monkeypatch, value)
    with pytest.raises(rs.ConfigError, match=says):
        computed("mine")
