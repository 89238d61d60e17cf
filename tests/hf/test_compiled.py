"""Trainers of compiled layers: the numbers of one process that compiles nothing, and no graph break."""

import shutil
from contextlib import closing
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.hf.trainers import SHORT, differences, plain, sft, train
from tests.pool import Pool

TOLERANCE = 1e-5
OPTIONS = dict([SHORT])


def compiled(mesh: Any, make: Any, backend: bool | str, options: dict[str, Any]) -> tuple[Any, int, int]:
    """Steps of compiled layers, and how many graph breaks and programs they took."""
    torch.compiler.reset()
    counters.clear()
    found = train(mesh, make, "llama", {"compile": backend}, OPTIONS | options)
    return found, sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def check(results: list[Any], expected: dict[str, Any], most: int) -> None:
    """Each rank has what is expected, by this many programs at most."""
    for found, breaks, programs in results:
        assert max(differences(found, expected).values()) < TOLERANCE
        assert breaks == 0 and 1 <= programs <= most


@pytest.mark.long
def test_packed_documents_and_adapters_are_part_of_the_programs(world):
    """Packed lengths differ from step to step."""
    options = {"packing": True, "lora": True}
    expected = train(None, sft, "llama", None, OPTIONS | options)
    # Of two layers, with and without gradients.
    check(world(2).run(compiled, 2, sft, "aot_eager", options), expected, 8)


@pytest.mark.long
@pytest.mark.timeout(900)  # Inductor generates C++ and has it compiled
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_inductor_generates_equals_one_process(ranks):
    expected = train(None, plain, "llama", None, OPTIONS)
    with closing(Pool(ranks, launched=True, timeout_seconds=600)) as pool:
        check(pool.run(compiled, ranks, plain, True, {}), expected, 2)  # with and without gradients
