"""Options and order of NCCL's calls, and other costs beside the device, as far as a CPU shows them."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.cli.commands.train import _spare_memory
from ringspan.torch.engine.attention.spec import AttentionSpec
from ringspan.torch.engine.transport import agreement
from ringspan.torch.engine.transport.exchange import Exchange
from ringspan.torch.engine.transport.protocol import FakeTransport, Nobody
from ringspan.torch.model.local_pass import Packed
from ringspan.torch.runtime import launch, mesh
from tests.torch.engine.attention.assembled import assemble
from tests.torch.models import build, tokens


class Options:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream


def test_blocks_are_sent_on_a_stream_of_high_priority(monkeypatch):
    """Else a message finds no room beside the attention that was started before it."""
    told = {}
    device = torch.device("cuda", 0)
    monkeypatch.setattr(launch, "local_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False
    )
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **given: told.update(given, backend=backend),
    )
    launch.join(timeout=timedelta(seconds=5))
    assert told["backend"] == "nccl" and told["device_id"] == device
    assert told["pg_options"].is_high_priority_stream

    made, met, axes = [], [], SimpleNamespace(get_group=lambda axis: "group")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(
        mesh,
        "init_device_mesh",
        lambda *_, **given: made.append([*given.values()]) or axes,
    )
    monkeypatch.setattr(mesh, "_meet_neighbours", lambda *given: met.append(given))
    monkeypatch.setattr(mesh, "take_timeout", lambda _: None)
    monkeypatch.setattr(mesh, "flatten_weights", lambda _: None)
    for replicate, ring in ((1, 8), (2, 4), (8, 1)):
        mesh.make_mesh("cuda", replicate, ring, 1)
    assert len(made[0]) == len(made[2]) == 1, "the default group has these options"
    backend, options = made[1][1]["ring"]
    assert backend == "nccl" and options.is_high_priority_stream
    assert met == [("group", "cuda")] * 2, "each ring, but not one of one rank"


def peers_met(ring):
    """The calls and peers of this rank, which gloo answers as NCCL would."""
    asked, send = [], dist.batch_isend_irecv

    def recorded(messages):
        asked.extend((each.op.__name__, each.group_peer) for each in messages)
        return send(messages)

    with mock.patch.object(dist, "batch_isend_irecv", recorded):
        mesh._meet_neighbours(ring["ring"].get_group(), "cpu")
    return asked


def test_neighbours_of_a_ring_are_connected_at_once(pool):
    for ranks in (2, 4):
        for rank, asked in enumerate(pool.run(peers_met, ranks)):
            near = sorted({(rank - 1) % ranks, (rank + 1) % ranks})
            assert asked == [
                (call, peer) for call in ("irecv", "isend") for peer in near
            ]


# FSDP's, by their names in PyTorch 2.11 and 2.13.
GATHER, SCATTER = (
    ("all_gather_into_tensor", "all_gather_single"),
    ("reduce_scatter_tensor", "reduce_scatter_single"),
)


def calls_of_a_step(both, options):
    """The axis and name of each collective of weights and each post of blocks, in a step's order."""
    log, originals = (
        [],
        {
            name: getattr(dist, name)
            for name in (*GATHER, *SCATTER, "all_reduce")
            if hasattr(dist, name)
        },
    )
    post = Exchange.post

    def recorded(name):
        def call(*arguments, **given):
            log.append((dist.get_process_group_ranks(given["group"]), name))
            return originals[name](*arguments, **given)

        return call

    def recorded_post(self, sends, receives, message):
        log.append((dist.get_process_group_ranks(self._group), "post"))
        return post(self, sends, receives, message)

    model = rs.parallelize(build("llama"), both, **options)
    batch = rs.shard_batch(
        {
            name: tokens(2, 40)[dist.get_rank() // 2 :][:1]
            for name in ("input_ids", "labels")
        },
        both,
    )
    try:
        Exchange.post = recorded_post
        for name in originals:
            setattr(dist, name, recorded(name))
        model(**batch).loss.backward()
    finally:
        Exchange.post = post
        for name, original in originals.items():
            setattr(dist, name, original)
    return log


@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "attention", "layers_per_checkpoint": 2}], ids=str
)
def test_all_ranks_start_their_communicators_in_one_order(pool, options):
    """NCCL wants one order of launches for two communicators on all ranks that share both."""
    logs = pool.run(calls_of_a_step, 4, options, replicate=2)
    # By the axis of a group: its ranks are neighbours on the ring, and two apart between replicas.
    kinds = [
        [(ranks[-1] - ranks[0], name) for ranks, name in log if len(ranks) > 1]
        for log in logs
    ]
    assert all(log == kinds[0] for log in kinds)
    seen = {name for _, name in kinds[0]}
    assert seen & {*GATHER} and seen & {*SCATTER} and {"all_reduce", "post"} <= seen


def steps_of_new_documents(ring, options):
    """How often this rank's attention has compared its arguments, and read the lengths, by the end of each step."""
    counts, compare = [0], agreement._compare
    model = rs.parallelize(build("llama"), ring, **options)

    def counted(*arguments):
        counts[-1] += 1
        return compare(*arguments)

    with mock.patch.object(agreement, "_compare", counted):
        for first in (5, 12, 17, 23):
            positions = torch.cat([torch.arange(first), torch.arange(40 - first)])[None]
            batch = {
                "input_ids": tokens(1, 40),
                "labels": tokens(1, 40),
                "position_ids": positions,
            }
            model(**rs.shard_batch(batch, ring)).loss.backward()
            counts.append(0)
    return counts[:-1]


def test_new_documents_cost_no_comparison_of_their_masks(pool):
    """A step's check of the batch says that all ranks have them."""
    for first, *others in pool.run(steps_of_new_documents, 2, {}):
        assert first <= 1 and others == [0, 0, 0], (
            "the first step may find what tests before it have agreed on"
        )


class Lengths(torch.Tensor):
    """A tensor on another device: whoever reads it waits for that."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu):
            cls.reads += 1
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return (
                result.as_subclass(torch.Tensor)
                if function is torch.Tensor.cpu
                else result
            )


def test_layers_do_not_wait_for_the_lengths_of_documents():
    lengths = torch.tensor([[5, 11]]).as_subclass(Lengths)
    model: Any = SimpleNamespace(ring_layout="zigzag")
    packed: Any = Packed(model, lengths, torch.zeros(1, 16))
    for _ in range(32):
        assert packed.lengths.tolist() == [[5, 11]]
    assert Lengths.reads == 1


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_ulysses_sends_each_member_one_message_at_a_time(passes):
    """NCCL may hang with more than 256 operations in one group."""
    posts, members = [], 64
    network = Nobody()
    q, k, v = (torch.zeros(1, heads, 2, 8) for heads in (64, 8, 8))
    exchange = FakeTransport(network)
    exchange.post = lambda sends, receives, message: (
        posts.append((len(sends), len(receives)))
        or FakeTransport.post(exchange, sends, receives, message)
    )
    exchange.among = lambda ranks, name: exchange
    spec = AttentionSpec(scale=1.0, layout="zigzag", route="ulysses")
    one, ulysses = assemble(
        0, members, exchange, q, k, None, spec, is_backward=passes == "backward"
    )
    assert ulysses
    if passes == "forward":
        ulysses.forward(one, q, k, v)
    else:
        ulysses.backward(one, q, q, k, v, q, torch.zeros(1, 64, 2))
    assert [each for each in posts if each != (0, 0)] == [
        (members - 1, members - 1)
    ] * 2


def test_operators_are_kept_out_of_cuda_graphs():
    for name in (
        "ring_attention",
        "ring_attention_backward",
        "layer_attention",
        "layer_attention_backward",
    ):
        assert (
            torch.Tag.cudagraph_unsafe in getattr(torch.ops.ringspan, name).default.tags
        )


@pytest.mark.parametrize(
    "name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
)
def test_training_lets_the_allocator_grow_unless_configured(monkeypatch, name):
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "mine")
    _spare_memory()
    found = {
        each: os.environ.get(each)
        for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    expected = (
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if name is None
        else {name: "mine"}
    )
    assert {each: value for each, value in found.items() if value} == expected
