"""Proofs of models on rings: exact as they are, and planted faults found and placed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import torch
from transformers import CONFIG_MAPPING

import ringspan as rs
from ringspan.proof import steps
from ringspan.proof.batches import batches
from ringspan.proof.run import COUNTS_PADDING, Proof, prove
from tests.cases import long

Plant = Callable[[Any], None]


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    """Change each model after it was put on the ring."""
    plain = steps.parallelize

    def parallelize(model: Any, *args: Any, **options: Any) -> Any:
        on_ring = plain(model, *args, **options)
        if plant is not None:
            plant(on_ring)
        return on_ring

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "parallelize", parallelize)
        yield


def proven(
    mesh: Any, kind: str, options: dict[str, Any], plant: Plant | None = None
) -> Proof:
    config = CONFIG_MAPPING[kind]()
    with planted(plant):
        return prove(config, mesh, **options)


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        (
            "llama",
            2,
            {
                "route": "ulysses",
                "checkpoint": "full",
                "z_loss": 0.01,
                "label_smoothing": 0.1,
                "loss_chunk_tokens": 512,
                "tree": True,
            },
        ),
        *long(("gemma3_text", 3, {"layout": "striped"}), ("qwen3_next", 2, {})),
        ("llama4_text", 2, {}),  # scales queries by positions, which count padding
        ("mistral_large4", 2, {}),  # scales them by logarithms
        ("paligemma", 2, {}),  # is told which tokens are of a prompt
        *long(("xglm", 2, {})),  # makes a number of the default dtype
        *long(
            ("dory", 2, {}),  # scales channels after it has rotated them
            ("gpt_oss", 2, {"folds": 2}),
            ("deepseek_v3", 2, {"compile": True}),
            ("mixtral", 4, {"route": "all-gather"}),
        ),
    ],
)
def test_models_are_exact_as_they_are(pool, kind, ranks, options):
    for proof in pool.run(proven, ranks, kind, options):
        assert proof.is_exact, proof.as_json()
        assert max(row.error for row in proof.rows if row.error is not None) < 1e-12
        tried = [row.batch for row in proof.rows if not row.refused]
        assert tried[0] == "one sequence" and len(tried) > 4
        assert proof.smallest is None


def of_config(mesh: Any, config: Any) -> Proof:
    return prove(config, mesh)


@pytest.mark.long
def test_a_batch_whose_padding_counts_is_not_compared(pool):
    config = CONFIG_MAPPING["minimax_m3_vl_text"](
        layer_types=["full_attention", "minimax_m3_sparse"] * 30
    )
    for proof in pool.run(of_config, 2, config):
        assert proof.is_exact, proof.as_json()
        refused = {row.batch: row.refused for row in proof.rows if row.refused}
        assert refused == {"padding on both sides": COUNTS_PADDING}


def norm_over_the_sequence(model: Any) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))


def restarting_positions(model: Any) -> None:
    rope = model.model.rotary_emb
    plain = rope.forward
    rope.forward = lambda x, position_ids, **kw: plain(x, position_ids % 16, **kw)


def scaled_gradient(model: Any) -> None:
    part = model.model.layers[0].mlp
    part.register_forward_hook(lambda _, __, out: out + 0.01 * (out - out.detach()))


def other_weights(model: Any) -> None:
    if torch.distributed.get_rank() == 1:
        weight = model.model.layers[1].self_attn.o_proj.weight
        with torch.no_grad():
            weight.to_local().add_(1e-3)


def ignored_window(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    plain, window = attention.forward, attention.sliding_window

    def forward(*args: Any, **others: Any) -> Any:
        # The second layer has no window; a cache finds its layer by the number.
        is_training = others.get("past_key_values") is None
        attention.layer_idx = 1 if is_training else 0
        attention.sliding_window = None if is_training else window
        return plain(*args, **others)

    attention.forward = forward


def router_by_the_mean(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_pre_hook(lambda _, args: args[0] - args[0].mean(0))


PLANTED: Final = [
    ("llama", norm_over_the_sequence, "the output of model.layers.1.post_attention_layernorm"),
    ("llama", scaled_gradient, "the gradient of model.layers.0."),
    ("gemma3_text", ignored_window, "the output of model.layers.0.self_attn"),
    *long(
        ("llama", restarting_positions, "the output of model.layers.0.self_attn"),
        ("llama", other_weights, "the output of model.layers.1.self_attn"),
        ("mixtral", router_by_the_mean, "the output of model.layers.1.mlp"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "plant", "place"), PLANTED)
def test_a_planted_fault_is_found_and_placed(pool, kind, plant, place):
    options = {"checkpoint": "none", "layout": "contiguous"}
    for proof in pool.run(proven, 2, kind, options, plant):
        wrong = next(row for row in proof.rows if not row.is_exact)
        assert wrong.place.startswith(place), wrong
        is_output = place.startswith("the output")
        assert bool(wrong.tokens) == is_output == any(wrong.wrong)
        assert proof.smallest == {}, "no option is to blame"


def lost_tiles(model: Any) -> None:
    """Give a kernel that loses every eighth query in bfloat16, and nothing in other dtypes."""

    def lose(_: object, __: object, output: Any) -> Any:
        hidden, *others = output
        if hidden.dtype == torch.bfloat16:
            hidden = hidden.clone()
            hidden[:, ::8] = 0
        return hidden, *others

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lose)


@pytest.mark.parametrize(
    ("dtype", "plant", "place"),
    [
        (torch.bfloat16, lost_tiles, "the output of model.layers.0.self_attn"),
        *long(
            (torch.bfloat16, None, ""),
            (torch.float32, lost_tiles, ""),
            (torch.float32, scaled_gradient, "the gradient of model.layers.0."),
        ),
    ],
)
def test_a_kernel_that_is_wrong_in_one_dtype_is_found_there(pool, dtype, plant, place):
    for proof in pool.run(proven, 2, "llama", {"dtype": dtype}, plant):
        wrong = [row.place for row in proof.rows if not row.is_exact]
        assert proof.is_exact == (not place), proof.as_json()
        assert not place or wrong[0].startswith(place)
        assert all(row.dtype in str(dtype) for row in proof.rows)


def of_two_releases(mesh: Any) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(rs.PeerMismatch) as found:
        if torch.distributed.get_rank() == 1:
            patch.setattr("transformers.__version__", "5.17.0")
        proven(mesh, "llama", {})
    return str(found.value)


def test_another_release_on_a_rank_is_named(pool):
    for message in pool.run(of_two_releases, 2):
        assert message.startswith("rank 1 has transformers 5.17.0, and rank 0 has")


def counted(mesh: Any, plant: Plant) -> tuple[Proof, dict[str, int]]:
    counts = {"run_on_ring": 0, "run_alone": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:

            def counting(*args: Any, name: str = name, plain: Any) -> Any:
                counts[name] += 1
                return plain(*args)

            plain = getattr(steps, name)
            patch.setattr(steps, name, partial(counting, name=name, plain=plain))
        return proven(mesh, "llama", {}, plant), counts


def test_looking_for_the_place_runs_no_batch_again(pool):
    for proof, counts in pool.run(counted, 2, scaled_gradient):
        assert proof.rows[0].place.startswith("the gradient of model.layers.0.")
        assert counts == {"run_on_ring": 5, "run_alone": 5}


def test_an_option_that_is_to_blame_is_named_alone(pool):
    options = {"layout": "striped", "comm_dtype": "int8", "checkpoint": "full"}
    for proof in pool.run(proven, 2, "llama", options):
        assert not proof.is_exact
        assert proof.smallest == {"comm_dtype": "int8"}
        assert "model.layers.0.self_attn" in proof.rows[0].place


def refused(mesh: Any, kind: str, options: dict[str, Any]) -> str:
    with pytest.raises(rs.RingspanError) as raised:
        proven(mesh, kind, options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("llama", {"route": "pass-q", "comm_dtype": "int8"}, "use 'exact'"),
        ("deepseek_v32", {"folds": 2}, "use folds=1"),
        ("xlm", {}, "computes attention in its own code"),
        ("deepseek_v2", {}, "does not run in transformers by itself"),
    ],
)
def test_what_a_ring_refuses_a_proof_refuses(pool, kind, options, said):
    for message in pool.run(refused, 2, kind, options):
        assert said in message


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_batches_have_targets_and_rest_on_some_ranks(ranks):
    given = batches(ranks, vocabulary=97, tree=True)
    for batch in given.values():
        assert (batch.inputs["labels"] != -100).any()
        seen = torch.zeros_like(batch.real)
        for row, places in batch.parts:
            seen[row, list(places)] = True
        assert (seen == batch.real).all()
    early = given["a rank without targets"].inputs["labels"]
    last = (early != -100).nonzero()[-1, 1]
    assert ranks == 1 or last < early.shape[1] // ranks
