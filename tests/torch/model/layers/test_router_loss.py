"""The auxiliary loss of mixtures of experts on the ring against transformers' own on one process."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import ringspan as rs
from ringspan.torch.model.layers.blockwise.blocks import RouterRecorder, run_in_blocks
from ringspan.torch.model.layers.router_loss import RouterLoss
from tests.cases import few, long
from tests.every_model.tiny import tiny_model
from tests.torch.models import build, close_by_name, relative, tokens, whole_gradients
from tests.torch.test_parallelize import restarting

LENGTH = 37


def mixture(kind: str) -> Any:
    model = tiny_model(kind)
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(model, name):
            # as large as the other part, so that an error in it shows
            setattr(model, name, 0.5)
    return model


def whole_batch(rows: int, padding: bool, documents: Any) -> dict[str, Tensor]:
    ids = tokens(rows, LENGTH)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding:
        # one of padding alone
        lengths = torch.tensor(
            [0 if row == 1 else LENGTH - 5 - 3 * row for row in range(rows)]
        )
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        batch |= {
            "attention_mask": mask,
            "labels": batch["labels"].masked_fill(mask == 0, -100),
        }
    if documents:
        batch["position_ids"] = restarting(documents)
    return batch


def one_process(kind: str, steps: int, rows: int, padding: bool, documents: Any) -> Any:
    """Loss, auxiliary loss and gradients of transformers, a micro-batch at a time."""
    model = mixture(kind)
    batch = whole_batch(rows * steps, padding, documents)
    count = int((batch["labels"][:, 1:] != -100).sum())
    losses, auxiliary = [], []
    for step in range(steps):
        part = {
            name: value[step * rows : (step + 1) * rows]
            for name, value in batch.items()
        }
        options = {"num_items_in_batch": count} if steps > 1 else {}
        out = model(**part, output_router_logits=True, use_cache=False, **options)
        out.loss.backward()
        losses.append(out.loss.detach())
        auxiliary.append(out.aux_loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": sum(losses), "auxiliary": sum(auxiliary), "gradients": gradients}


def on_the_ring(
    mesh: DeviceMesh, kind: str, layout: str, steps: int, padding: bool, options: Any
) -> Any:
    replicate = mesh["replicate"].size()
    documents, where = options.pop("documents", None), options.pop("where", "call")
    model = mixture(kind)
    if where == "config before":
        model.config.output_router_logits = True
    model = rs.parallelize(model, mesh, layout=layout, **options)
    if where == "config after":
        model.config.output_router_logits = True
    asked = {"output_router_logits": True} if where == "call" else {}
    batch = whole_batch(replicate * steps, padding, documents)
    count = int((batch["labels"][:, 1:] != -100).sum())
    loss, auxiliary = torch.zeros(()), torch.zeros(())
    for step in range(steps):
        row = step * replicate + mesh["replicate"].get_local_rank()
        part = rs.shard_batch(
            {name: value[row : row + 1] for name, value in batch.items()},
            mesh,
            layout=layout,
        )
        if steps > 1:
            part["num_items_in_batch"] = torch.tensor(count)
        out = model(**part, **asked)
        out.loss.backward()
        loss, auxiliary = loss + out.loss.detach(), auxiliary + out.aux_loss.detach()
    return {"loss": loss, "auxiliary": auxiliary, "gradients": whole_gradients(model)}


def compare(results: list[Any], expected: Any) -> None:
    for result in results:
        assert relative(result["auxiliary"], expected["auxiliary"]) < 1e-6
        assert relative(result["loss"], expected["loss"]) < 1e-6
        close_by_name(result["gradients"], expected["gradients"])


KINDS = [
    "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared", "jetmoe",
    "laguna", "mellum", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
]  # fmt: skip


@pytest.mark.parametrize("kind", few(KINDS, 8))
def test_the_auxiliary_loss_equals_that_of_one_process(pool, kind):
    if kind == "granitemoe" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers 5.17 takes a number for a tensor there")
    expected = one_process(kind, 1, 1, False, None)
    assert float(expected["auxiliary"]) > 0
    # it has no activation checkpointing
    options = {"checkpoint": "none"} if kind == "jetmoe" else {}
    compare(pool.run(on_the_ring, 2, kind, "zigzag", 1, False, options), expected)


CASES = [
    # ranks, replicate, layout, micro-batches, padding, options
    (3, 1, "zigzag", 1, True, {}),
    (4, 2, "striped", 2, True, {"checkpoint": "none"}),
    *long((2, 1, "contiguous", 3, False, {"checkpoint": "full"})),
    (3, 1, "zigzag", 1, True, {"checkpoint": "full", "feedforward_chunk_tokens": 4}),
    *long(
        (
            2,
            1,
            "zigzag",
            1,
            False,
            {"feedforward_chunk_tokens": 7, "layers_per_checkpoint": 2},
        ),
        (
            2,
            1,
            "zigzag",
            1,
            False,
            {"feedforward_chunk_tokens": 0, "offload": "activations"},
        ),
    ),
    (3, 1, "striped", 1, False, {"documents": [[17, 20]]}),
    *long(
        (2, 1, "balanced", 1, False, {"documents": [[17, 20]]}),
        (2, 1, "zigzag", 1, False, {"where": "config before"}),
    ),
    (2, 1, "zigzag", 1, False, {"where": "config after"}),
]


@pytest.mark.parametrize(
    ("ranks", "replicate", "layout", "steps", "padding", "options"), CASES
)
def test_router_losses_hold_for_any_split_and_checkpoint(
    pool, ranks, replicate, layout, steps, padding, options
):
    expected = one_process(
        "mixtral", steps, replicate, padding, options.get("documents")
    )
    results = pool.run(
        on_the_ring,
        ranks,
        "mixtral",
        layout,
        steps,
        padding,
        options,
        replicate=replicate,
    )
    compare(results, expected)


def without_labels(mesh: DeviceMesh) -> Any:
    model = rs.parallelize(mixture("mixtral"), mesh)
    part = rs.shard_batch({"input_ids": tokens(1, LENGTH)}, mesh)
    with torch.no_grad():
        return model(**part, output_router_logits=True).aux_loss, model(**part).get(
            "aux_loss"
        )


def test_logits_come_with_an_auxiliary_loss_when_it_is_asked_for(pool):
    expected = one_process("mixtral", 1, 1, False, None)["auxiliary"]
    for found, unasked in pool.run(without_labels, 2):
        assert relative(found, expected) < 1e-6
        assert unasked is None


def asked_of_a_dense_model(mesh: DeviceMesh, when: str) -> None:
    model = build("llama")
    if when == "before":
        model.config.output_router_logits = True
    model = rs.parallelize(model, mesh)
    if when == "after":
        model.config.output_router_logits = True
    batch = rs.shard_batch({"input_ids": tokens(1, 16)}, mesh)
    model(**batch, **({"output_router_logits": True} if when == "call" else {}))


@pytest.mark.parametrize("when", ["before", "after", "call"])
def test_a_model_without_such_a_loss_says_so(pool, when):
    for outcome in pool.outcomes(asked_of_a_dense_model, 2, when):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "LlamaForCausalLM adds no load-balancing loss" in str(outcome)


def asked_of_one_rank(mesh: DeviceMesh) -> None:
    model = rs.parallelize(mixture("mixtral"), mesh)
    batch = rs.shard_batch({"input_ids": tokens(1, 16)}, mesh)
    model(**batch, output_router_logits=mesh["ring"].get_local_rank() == 1)


def test_ranks_that_do_not_all_ask_for_it_say_so(pool):
    for outcome in pool.outcomes(asked_of_one_rank, 2):
        assert isinstance(outcome, rs.PeerMismatch)
        assert (
            "the ranks were given different output_router_logits: rank 0: False, rank 1: True"
            in str(outcome)
        )


def test_it_is_transformers_own_on_scores_with_padding():
    scores = tuple(torch.randn(12, 5) for _ in range(3))
    real = torch.arange(12) % 6 < 4
    ours = RouterLoss(5, 2, "router_aux_loss_coef", RouterRecorder(5))(scores, real, [])
    assert (
        relative(ours, load_balancing_loss_func(scores, 5, 2, real.view(2, 6))) < 1e-6
    )
    everything = RouterLoss(5, 2, "router_aux_loss_coef", RouterRecorder(5))(
        scores, torch.ones(12), []
    )
    assert relative(everything, load_balancing_loss_func(scores, 5, 2)) < 1e-6


def scores_and_gradients(chunk_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """What a recorder gets of a mixture of experts, and the gradients of a loss of its result and its scores."""
    feedforward, recorder = mixture("mixtral").model.layers[0].mlp, RouterRecorder(4)
    recorder.attach(feedforward.gate, 0)
    if chunk_tokens:
        run_in_blocks(
            [feedforward], chunk_tokens, "feedforward_chunk_tokens", recorder=recorder
        )
    hidden = torch.randn(
        2, 11, 64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    with recorder.recording() as recorded:
        out = feedforward(hidden)
    [scores] = recorded
    (out.square().sum() + torch.softmax(scores, -1).square().sum()).backward()
    gradients = {
        name: parameter.grad for name, parameter in feedforward.named_parameters()
    }
    return scores.detach(), gradients | {"hidden": hidden.grad}


def test_router_scores_in_blocks_are_whole_with_gradients():
    (scores, gradients), (whole_scores, whole_gradients) = (
        scores_and_gradients(5),
        scores_and_gradients(0),
    )
    assert relative(scores, whole_scores) < 1e-6
    close_by_name(gradients, whole_gradients)
