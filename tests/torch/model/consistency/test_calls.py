"""Ranks that were given different things: whatever differs, each of them says so, names it, and goes on afterwards."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler

import ringspan as rs
from ringspan.torch.engine.transport.digest import digest_integers, digest_values
from ringspan.torch.model.config_changes import deciding_fields
from ringspan.torch.model.consistency.calls import _are_alike, _with_squares, _words
from tests.cases import few
from tests.torch.data.test_batch import Ring
from tests.torch.models import build, tokens

ROWS = tokens(8, 16)


def is_odd(mesh: DeviceMesh) -> bool:
    """Whether this is the rank that was given something else: the last one."""
    return mesh.get_rank() == int(mesh.mesh.max())


def batch(mesh: DeviceMesh, **changes: Any) -> dict[str, Any]:
    whole = {"input_ids": ROWS[:1], "labels": ROWS[:1]}
    return rs.shard_batch(whole | (changes if is_odd(mesh) else {}), mesh)


CHANGES = {
    "tokens": {"input_ids": ROWS[1:2]},
    "labels": {"labels": ROWS[:1].masked_fill(ROWS[:1] < 9, -100)},
    "documents": {"position_ids": torch.arange(8).repeat(2)},
    "padded length": {"input_ids": ROWS[:1, :15], "labels": ROWS[:1, :15]},
    "length": {"input_ids": ROWS[:1, :8], "labels": ROWS[:1, :8]},
    "batch size": {"input_ids": ROWS[:2], "labels": ROWS[:2]},
}


def step(mesh: DeviceMesh, what: str) -> None:
    """A step in which the last rank does or has something else."""
    torch.manual_seed(0)
    model = rs.parallelize(build("llama"), mesh)
    odd = is_odd(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch(mesh)).loss.backward()  # all is known by now, and well
    match what:
        case (
            "tokens"
            | "labels"
            | "documents"
            | "padded length"
            | "length"
            | "batch size"
        ):
            model(**batch(mesh, **CHANGES[what]))
        case "padding that has no target anyway":
            whole = {"input_ids": ROWS[:1], "labels": ROWS[:1].clone()}
            whole["labels"][:, 9:] = -100
            whole["attention_mask"] = (torch.arange(16) < (12 if odd else 10)).long()[
                None
            ]
            model(**rs.shard_batch(whole, mesh))
        case "no labels":
            part = batch(mesh)
            if odd:
                del part["shift_labels"]
            model(**part)
        case "num_items_in_batch":
            model(**batch(mesh), num_items_in_batch=14 if odd else 15)
        case "mode":
            model.train(not odd)(**batch(mesh))
        case "autocast":
            with torch.autocast("cpu", torch.bfloat16 if odd else torch.float16):
                model(**batch(mesh))
        case "a skipped step before saving":
            if not odd:
                optimizer.step()
            model.save_pretrained("/proc/nothing")
        case "gradients":
            with torch.set_grad_enabled(not odd):
                model(**batch(mesh))
        case "trained parameters":
            model.lm_head.weight.requires_grad_(not odd)
            model(**batch(mesh))
        case "learning rate":
            optimizer.param_groups[0]["lr"] = 0.2 if odd else 0.1
            optimizer.step()
            model(**batch(mesh))
        case "optimizer steps":
            if not odd:
                optimizer.step()
            model(**batch(mesh))
        case "optimizer parameters":
            parameters = [*model.parameters()]
            torch.optim.SGD(parameters[1:] if odd else parameters[:-1], lr=0.1).step()
            model(**batch(mesh))
        case "another model":
            other = rs.parallelize(build("llama"), mesh)
            (other if odd else model)(**batch(mesh))
        case "saving fails":
            model.save_pretrained("/proc/nothing/at/all" if odd else "/proc/nothing")
        case "an unknown argument":
            model(**batch(mesh), **({"use_cache": True} if odd else {}))
        case "an argument that is missing":
            model(**({} if odd else batch(mesh)))
        case "an exception":
            model(**batch(mesh), **({"num_items_in_batch": Surprise()} if odd else {}))
        case "saving":
            if odd:
                model.save_pretrained("nowhere")
            else:
                model(**batch(mesh))


class Surprise:
    """Raises what nobody expects."""

    def __eq__(self, other: object) -> bool:
        raise OSError("out of paper")

    __hash__ = None

    def __repr__(self) -> str:
        raise OSError("out of paper")


CASES = {
    "tokens": "different input_ids",
    "labels": "different labels",
    "documents": "different documents",
    "padding that has no target anyway": "different attention_mask: ",
    "padded length": "different length of the longest document: ",
    "length": "different local length: ",
    "batch size": "different batch size: ",
    "no labels": "different labels: ",
    "num_items_in_batch": "different num_items_in_batch: ",
    "mode": "different mode: ",
    "gradients": "different gradients: ",
    "autocast": "different autocast: ",
    "a skipped step before saving": "different steps of the optimizer SGD: ",
    "trained parameters": "different trained parameters: ",
    "learning rate": "different optimizer setting lr of SGD: ",
    "optimizer steps": "different steps of the optimizer SGD: ",
    "optimizer parameters": "different parameters of the optimizer SGD: ",
    "another model": "different model: ",
    "saving fails": "/proc/nothing",
    "an unknown argument": "use_cache=True",
    "an argument that is missing": "rs.shard_batch",
    "an exception": "out of paper",
    "saving": "the ranks do different things: ",
}


@pytest.mark.parametrize(
    ("what", "shape"),
    # On every other mesh one of the batch, and one of an optimizer, whose ranks talk over other groups.
    [
        *few(((what, (2, 1, 1)) for what in CASES), 2),
        *product(("tokens", "learning rate"), [(3, 1, 1), (4, 2, 1), (4, 1, 2)]),
    ],
    ids=str,
)
def test_what_differs_between_ranks_is_named_on_every_rank(pool, what, shape):
    ranks, replicate, tp = shape
    outcomes = pool.outcomes(step, ranks, what, replicate=replicate, tp=tp)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Exception), outcome
        assert CASES[what] in str(outcome)
        if "different" in CASES[what]:
            assert isinstance(outcome, rs.PeerMismatch)
            assert f"rank {ranks - 1}: " in str(outcome), rank
    messages = {
        str(outcome).split("out of paper")[0][-20:] for outcome in outcomes[:-1]
    }
    assert len(messages) == 1


def sampled_by_the_world(mesh: DeviceMesh, replicas: int | None) -> None:
    """What torch's sampler does by default: another example for each rank of a ring."""
    model = rs.parallelize(build("llama"), mesh)
    ranks = (
        {}
        if replicas is None
        else {"num_replicas": replicas, "rank": mesh["replicate"].get_local_rank()}
    )
    if replicas is None:
        ranks = {"num_replicas": mesh.size(), "rank": mesh.get_rank()}
    [ids, *_] = DataLoader(
        ROWS, sampler=DistributedSampler(range(8), shuffle=False, **ranks)
    )
    model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh))


def test_a_sampler_of_the_world_is_named_with_what_to_give_it(pool):
    for outcome in pool.outcomes(sampled_by_the_world, 4, None, replicate=2):
        assert isinstance(outcome, rs.PeerMismatch)
        assert "rs.sampler(dataset, mesh)" in str(outcome) and "num_replicas=2" in str(
            outcome
        )
    assert pool.run(sampled_by_the_world, 4, 2, replicate=2) == [None] * 4


def replicas_of_other_lengths(mesh: DeviceMesh) -> float:
    """Each replica pads to its own longest example."""
    model = rs.parallelize(build("llama"), mesh)
    replica = mesh["replicate"].get_local_rank()
    ids = ROWS[replica : replica + 1, : 16 - 5 * replica]
    loss = model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss
    loss.backward()
    return float(loss.detach())


def test_replicas_may_have_other_lengths(pool):
    model = build("llama")
    sums = [
        torch.nn.functional.cross_entropy(
            model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum"
        )
        for ids in (ROWS[0], ROWS[1, :11])
    ]
    expected = float(sum(sums).detach()) / (15 + 10)
    assert (
        pool.run(replicas_of_other_lengths, 4, replicate=2)
        == [pytest.approx(expected, rel=1e-6)] * 4
    )


def refused_by_one(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    rs.parallelize(build("llama"), mesh, **(options if is_odd(mesh) else {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "striped"}, "different layout: rank"),
        ({"loss_chunk_tokens": 7}, "different loss_chunk_tokens: rank"),
        ({"checkpoint": "some"}, "unknown checkpoint policy 'some'"),
        ({"compute_dtype": torch.bfloat16}, "different compute_dtype: rank"),
    ],
    ids=str,
)
def test_options_that_differ_are_named_on_every_rank(pool, options, message):
    for outcome in pool.outcomes(refused_by_one, 3, options):
        assert isinstance(outcome, rs.RingspanError) and message in str(outcome)


def configured_on_one(mesh: DeviceMesh, option: str) -> None:
    model: Any = build("llama")
    if is_odd(mesh) and option == "lora_alpha":
        model = get_peft_model(
            model, LoraConfig(lora_alpha=3, target_modules=["q_proj"])
        )
    elif option == "lora_alpha":
        model = get_peft_model(
            model, LoraConfig(lora_alpha=8, target_modules=["q_proj"])
        )
        model.peft_config["default"].base_model_name_or_path = "elsewhere"
    elif is_odd(mesh):
        setattr(
            model.config,
            option,
            {"rms_norm_eps": 1e-3, "id2label": {0: "a"}}.get(option, "elsewhere"),
        )
    rs.parallelize(model, mesh)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("rms_norm_eps", "different config.rms_norm_eps: ranks 0, 1: 1e-06"),
        (
            "lora_alpha",
            "different lora_alpha of the adapter 'default': ranks 0, 1: 8, rank 2: 3",
        ),
    ],
)
def test_a_config_that_differs_in_a_number_is_named(pool, option, says):
    for outcome in pool.outcomes(configured_on_one, 3, option):
        assert isinstance(outcome, rs.PeerMismatch) and says in str(outcome)


@pytest.mark.parametrize("option", ["_name_or_path", "id2label"])
def test_a_config_may_differ_in_a_name(pool, option):
    assert pool.run(configured_on_one, 2, option) == [None, None]


def test_names_inside_of_a_config_do_not_decide_numbers():
    inner = {"_name_or_path": "a", "dtype": "float32", "head_dim": 8}
    outer = {"text_config": inner, "architectures": ["A"], "eps": 1.0}
    assert deciding_fields(outer) == {"text_config": {"head_dim": 8}, "eps": 1.0}


def frozen_on_one(mesh: DeviceMesh) -> None:
    model = build("llama")
    model.model.norm.weight.requires_grad_(not is_odd(mesh))
    rs.parallelize(model, mesh)


def test_a_parameter_that_one_rank_does_not_train_is_named(pool):
    for outcome in pool.outcomes(frozen_on_one, 3):
        assert isinstance(outcome, rs.PeerMismatch) and "model.norm.weight" in str(
            outcome
        )


def drawn_by_each_rank(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The weights of a model of which each rank has drawn its own, or all but one tensor."""
    model = build("llama", seed=mesh.get_rank())
    if mesh["replicate"].size() > 1:
        model = build("llama", seed=0)
        torch.nn.init.normal_(model.lm_head.weight, std=1 + mesh.get_rank())
    model = rs.parallelize(model, mesh)
    return {
        name: parameter.detach().full_tensor()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize(("ranks", "replicate"), [(3, 1), (4, 2), (4, 4)])
def test_weights_drawn_differently_become_those_of_rank_0(
    pool, ranks, replicate, capfd
):
    results = pool.run(drawn_by_each_rank, ranks, replicate=replicate)
    if replicate == 1:
        expected = dict(build("llama", seed=0).named_parameters())
        assert all(torch.equal(results[0][name], expected[name]) for name in expected)
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in results[0])


def replicas() -> list[Any]:
    return [Ring(2, number) for number in (0, 1)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_replicas_different_examples(shuffle):
    loaders = [
        rs.loader(list(range(11)), mesh, batch_size=2, shuffle=shuffle, seed=5)
        for mesh in replicas()
    ]
    epochs = [
        [
            [number for batch in loader for number in batch.tolist()]
            for loader in loaders
        ]
        for _ in range(2)
    ]
    for first, second in epochs:
        assert {*first, *second} == {*range(11)}
        # one more than there are: it comes out even
        assert len(first) == len(second) == 6
    assert (epochs[0] != epochs[1]) == shuffle


def test_a_loop_that_leaves_an_epoch_sees_other_examples_next():
    sampler = rs.sampler(range(64), replicas()[0], shuffle=True)
    first = [next(iter(sampler)) for _ in range(8)]
    assert len(set(first)) > 1


def counted(mesh: DeviceMesh) -> set[float]:
    model, counts = (
        rs.parallelize(build("llama"), mesh),
        (torch.tensor(15), torch.tensor([15]), np.int64(15)),
    )
    losses = [
        model(**batch(mesh), num_items_in_batch=count).loss
        for count in (15, *counts, np.array(15), 15.0)
    ]
    return {float(loss.detach()) for loss in losses}


def test_a_count_may_be_an_integer_of_any_library(pool):
    assert [len(losses) for losses in pool.run(counted, 2)] == [1, 1]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_a_loader_deals_a_stream_to_the_replicas():
    dealt = [
        [batch.tolist() for batch in rs.loader(Stream(), mesh, batch_size=2)]
        for mesh in replicas()
    ]
    assert dealt == [[[0, 2], [4]], [[1, 3], [5]]]


class Noisy(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_what_workers_draw_is_alike_on_a_ring():
    meshes = replicas()
    loaders = [
        rs.loader(Noisy(), mesh, num_workers=1, seed=3) for mesh in (meshes[0], *meshes)
    ]
    first, second, other = ([float(x) for x in loader] for loader in loaders)
    assert first == second != other


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_sums_tell_whether_all_words_are_alike(facts):
    sums = [
        sum(column)
        for column in zip(*(_with_squares(_words(fact)) for fact in facts), strict=True)
    ]
    assert _are_alike(len(facts), sums) == (len(set(facts)) == 1)


@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 1000), st.randoms())
def test_a_digest_sees_every_entry_its_place_and_the_shape(
    length, place, change, random
):
    x = torch.tensor([random.randrange(100_000) for _ in range(length)])
    changed = x.clone()
    changed[place % length] += change
    assert digest_integers(x) == digest_integers(x.clone()) != digest_integers(changed)
    swapped = x.flip(0)
    assert bool(digest_integers(x) == digest_integers(swapped)) == torch.equal(
        x, swapped
    )
    assert digest_integers(x) != digest_integers(x[None])
    assert digest_integers(x) != digest_integers(
        torch.cat((x, torch.zeros(1, dtype=x.dtype)))
    )
    assert (digest_values(x) == digest_values(changed)) is False


@pytest.mark.parametrize("shape", [(1, 33), (3, 7), (5,)])
def test_a_tensor_with_gaps_has_the_digest_of_its_copy(shape):
    x = torch.arange(2 * math.prod(shape)).view(*shape, 2)[..., 1]
    assert digest_values(x) == digest_values(x.clone())


def test_the_rank_of_a_call_in_a_group_is_that_of_the_world(pool):
    for outcome in pool.outcomes(step, 4, "tokens", replicate=2):
        assert (
            "rank 2: digest" in str(outcome)
            and "rank 3: digest" in str(outcome)
            and "rank 0" not in str(outcome)
        )
    assert not dist.is_initialized()
