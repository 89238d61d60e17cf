"""Which kernel serves what, against the rule of choice itself, and the table that says so."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.tables.kernels import serves
from ringspan.core.geometry.tile import Tile
from ringspan.measure.cluster.doctor import CASES, kernel_report, serving
from ringspan.torch.engine import kernels
from ringspan.torch.engine.kernels.contract import Scores
from ringspan.torch.engine.kernels.device import DeviceRules, ruled_by, rules_of

PAGE = Path(__file__).parents[3] / "docs" / "masks.md"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_table_of_the_page_is_what_the_kernels_say():
    assert serves() in PAGE.read_text(encoding="utf-8")


def test_shares_are_of_all_pairs():
    for case in CASES.values():
        served = serving(case, CPU)
        assert not served or sum(served.values()) == pytest.approx(1)


FAST_CPU = replace(rules_of(CPU), multiplies_16_bits=True)


@ruled_by(cpu=FAST_CPU)
def test_a_kernel_that_refuses_a_tile_loses_its_share(monkeypatch):
    assert serving(CASES["causal"], CPU) == {"cpu": 1.0}
    choose, full = kernels.choose, ("cpu", "eager")

    def only_full(_, tiles, q):
        return choose(full[not all(t.is_full for t in tiles) :], tiles, q)

    monkeypatch.setattr(kernels, "choose", only_full)
    shares = serving(CASES["causal"], CPU)
    assert set(shares) == {"cpu", "eager"} and 0.5 < shares["cpu"] < 0.9


@ruled_by(cpu=FAST_CPU, cuda=DeviceRules(cuts_for_cores=False, capability=(7, 5)))
def test_what_does_not_run_here_says_why():
    report = kernel_report([CPU])
    assert report["cpu"]["available"] and report["cpu"]["why_not"] is None
    assert report["flash"] == {
        "available": False,
        "serves": {},
        "why_not": "it needs a CUDA device, and this machine has none",
    }
    assert set(report["eager"]["serves"]) == {
        "short documents, float32",
        "causal, soft cap (Gemma 2)",
        "causal, ALiBi",
    }
    report = kernel_report([CUDA])
    assert re.match(
        "it needs compute capability 8.0, this device has 7.5",
        report["flash"]["why_not"],
    )
    assert report["eager"]["serves"]["causal"] == 1.0
    report = kernel_report([CPU, CUDA])
    assert "7.5" in report["flash"]["why_not"], (
        "that the CPU cannot run it is no reason where there is a GPU"
    )


def test_no_kernel_is_chosen_where_it_does_not_run():
    q = torch.empty(1, 1, 8, 16, device="meta")
    names = kernels.serving("auto", q, q, Scores(1.0))
    assert kernels.choose(names, (Tile.full(0, 8, 0, 8),), q).name == "eager"
