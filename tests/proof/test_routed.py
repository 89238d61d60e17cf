"""Proofs of mixtures of experts in bfloat16: tokens go where they do in float64, and faults show."""

from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from ringspan.core.errors import UnsupportedError
from ringspan.proof import run, trial
from ringspan.proof.routed import share_elsewhere
from ringspan.proof.run import Proof, prove
from ringspan.torch.model.layers.routing import PassRoutes
from tests.cases import long
from tests.proof.test_run import Plant, planted, router_by_the_mean

IN_BFLOAT16: Final = {"dtype": torch.bfloat16, "checkpoint": "none"}


def proven(
    mesh: Any,
    kind: str,
    seed: int = 3,
    plant: Plant | None = None,
    *,
    is_live: bool = False,
    **options: Any,
) -> Proof:
    """Prove a type in bfloat16 with weights of a seed, on the routes of float64, or of its own rounding."""
    with pytest.MonkeyPatch.context() as patch, planted(plant):
        patch.setattr(trial, "_SEED", seed)
        if is_live:
            patch.setattr(run, "has_experts", lambda _: False)
        return prove(CONFIG_MAPPING[kind](), mesh, **IN_BFLOAT16 | options)


SEEDS: Final = [("gpt_oss", 3), *long(("gpt_oss", 5), ("gpt_oss", 7), ("gpt_oss", 9))]


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_a_token_that_rounding_sends_elsewhere_is_no_difference(pool, kind, seed):
    live = pool.run(with_live_routes, 2, kind, seed)[0]
    # It differs, or a token went elsewhere on one process too, and the bound lets almost anything pass.
    assert not live.is_exact or max(row.bound for row in live.rows) > 0.5
    for proof in pool.run(proven, 2, kind, seed):
        assert proof.is_exact, proof.as_json()
        assert max(row.bound for row in proof.rows) <= 0.2
        assert not any("elsewhere" in each for each in proof.not_tried)


def with_live_routes(mesh: Any, kind: str, seed: int) -> Proof:
    return proven(mesh, kind, seed, is_live=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_bounds_of_mixtures_are_rounding(pool, kind, seed):
    for proof in pool.run(proven, 2, kind, seed):
        assert proof.is_exact, proof.as_json()
        assert max(row.bound for row in proof.rows) <= 0.2


def one_expert_scaled(model: Any) -> None:
    """Scale what one of a layer's experts makes, which not all tokens go to."""
    down = model.model.layers[1].mlp.experts.down_proj
    with torch.no_grad():
        local = down.to_local()
        if torch.distributed.get_rank() == 0:
            local[0] *= 1.5


def choice_by_other_scores(model: Any) -> None:
    """Let a router choose the experts with the lowest scores, though their weights would be right."""
    gate = model.model.layers[1].mlp.gate
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(
            gate.e_score_correction_bias
            + torch.arange(len(gate.e_score_correction_bias))
        )


@pytest.mark.parametrize(
    ("kind", "plant", "said"),
    [
        ("qwen3_moe", one_expert_scaled, "the output of model.layers.1.mlp"),
        ("qwen3_moe", router_by_the_mean, "the output of model.layers.1.mlp"),
        ("deepseek_v3", choice_by_other_scores, "the experts that routers choose"),
    ],
)
def test_faults_of_experts_and_routers_are_found_in_bfloat16(pool, kind, plant, said):
    for proof in pool.run(proven, 2, kind, 3, plant):
        wrong = [row for row in proof.rows if not row.is_exact]
        assert wrong, proof.as_json()
        assert (wrong[0].place or wrong[0].of).startswith(said), wrong[0]


def compiled(mesh: Any) -> Proof:
    return proven(mesh, "mixtral", compile="eager")


def test_what_goes_its_own_ways_is_named(pool):
    for proof in pool.run(compiled, 2):
        (said,) = [each for each in proof.not_tried if "elsewhere" in each]
        assert "in bfloat16" in said and "compiled layers" in said


def test_the_share_of_other_choices_is_of_layers_that_choose():
    expected = torch.tensor([[[[0, 1], [-1, -1]], [[2, 3], [-1, -1]]]])
    found = torch.tensor([[[[1, 0], [5, 6]], [[2, 1], [5, 6]]]])
    assert share_elsewhere(found, expected) == 0.5
    assert share_elsewhere(found, torch.full_like(found, -1)) == 0.0


def test_layers_with_other_numbers_of_experts_have_no_routes():
    routes = PassRoutes(None, 4, 2, 3)
    for number, chosen in enumerate((1, 2)):
        with routes.of_layer(number):
            Tensor.topk(torch.rand(3, 4), chosen)
    with pytest.raises(
        UnsupportedError, match="chooses 2 experts of a token and another one 1"
    ):
        _ = routes.live


def test_rounding_as_large_as_the_numbers_is_named(pool):
    [proof, _] = pool.run(proven, 2, "gemma4_text")
    wide = [row for row in proof.rows if row.bound >= 1]
    hidden = [each for each in proof.not_tried if "mistakes below the rounding" in each]
    assert wide and len(hidden) == len(wide)
    assert f"bfloat16 in {wide[0].batch}: one process is off by" in hidden[0]
