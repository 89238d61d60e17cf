"""The TPU kernels, interpreted, against the float64 oracle; and lowered, and where its compiler is installed compiled,
for a TPU that is not there.
"""

import re

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")

import jax
import jax.numpy as jnp
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ringspan as rs
from benchmarks.tpu import both_passes, covered_messages, tpus
from ringspan.core.names import LAYOUT_NAMES
from ringspan.jax import attention, sharded_ring_attention
from ringspan.jax.program import KEY_BITS, compile_pairs, compile_program
from tests.cases import long
from tests.core.strategies import masks
from tests.fuzz import examples
from tests.jax.rings import SPLIT, mesh
from tests.jax.test_attention import (
    check_any_mask,
    check_as_good_as_xla,
    check_same_as_xla,
)
from tests.torch.engine.attention.test_ring import Problem

SINKS = np.array([0.3, -2.0, 1.5, 4.0], np.float32)


@given(
    short=st.integers(0, 7),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.sampled_from([1, 2]),
)
@examples(2, suppress_health_check=[HealthCheck.too_slow])
def test_any_mask_on_any_layout(short, mask, layout, ranks):
    check_any_mask(16, short, mask, layout, ranks, (4, 2), "pallas")


@pytest.mark.parametrize(
    ("layout", "ranks", "mask", "keys", "options"),
    [
        (
            "zigzag",
            2,
            rs.causal(),
            None,
            {"scale": -0.5, "softcap": 1.5, "sinks": SINKS},
        ),
        *long(("contiguous", 2, rs.full(), 64, {"scale": -0.5})),
    ],
    ids=["sinks and softcap", "cross-attention"],
)
def test_it_computes_what_the_other_kernel_does(layout, ranks, mask, keys, options):
    problem = Problem(128, mask, keys=keys, batch=2, heads=4, groups=2, size=24)
    check_same_as_xla(
        "pallas", problem, layout, ranks, query_chunk=16, key_chunk=8, **options
    )


@pytest.mark.long
def test_bfloat16_is_as_good_as_the_other_kernel():
    check_as_good_as_xla(
        "pallas", torch.bfloat16, 256, 64, query_chunk=32, key_chunk=32
    )


@given(mask=masks, layout=st.sampled_from(LAYOUT_NAMES), ranks=st.integers(1, 5))
@examples(60)
def test_the_lists_are_those_of_the_program_in_order(mask, layout, ranks):
    split = rs.Layout(layout, ranks * 24, ranks)
    program = compile_program(split, split, mask, 4, 6)
    pairs = compile_pairs(program)
    for row, number in enumerate(pairs.num):
        expected = set()
        for query, key, count in program.runs[row, : program.num_runs[row]].tolist():
            expected |= {(query // 4, key // 6 + n, None) for n in range(count)}
        for query, key, *bands in program.partial[
            row, : program.num_partial[row]
        ].tolist():
            expected.add((query // 4, key // 6, tuple(bands)))
        for table, order in ((pairs.by_query, 0), (pairs.by_key, 1)):
            listed = [
                (
                    where >> KEY_BITS,
                    where % (1 << KEY_BITS),
                    None if cut < 0 else tuple(pairs.lists[cut].tolist()),
                )
                for where, cut in table[row].tolist()
            ]
            assert (
                len(set(listed[:number])) == number and set(listed[:number]) == expected
            )
            places = [pair[order] for pair in listed]
            assert (
                places[:number] == sorted(places[:number])
                and len(set(listed[max(0, number - 1) :])) == 1
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "cudnn"}, "unknown kernel 'cudnn'; choose one of xla, pallas"),
        (
            {"kernel": "pallas", "query_chunk": 5},
            "chunks of 4 queries and 7 keys do not divide",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options, message):
    x = np.zeros((1, 2, 14 if "query_chunk" in options else 16, 4), np.float32)
    with pytest.raises(rs.UnsupportedError, match=message):
        sharded_ring_attention(
            x, x, x, mesh=mesh(sp=2), layout="contiguous", key_chunk=8, **options
        )


def test_other_numbers_and_devices_are_refused(monkeypatch):
    x = np.zeros((1, 2, 16, 4), np.float16)
    with pytest.raises(rs.UnsupportedError, match="float32 and bfloat16, not float16"):
        sharded_ring_attention(x, x, x, mesh=mesh(sp=2), kernel="pallas")
    checked = jax.shard_map(
        lambda x: attention.ring_attention(x, x, x, kernel="pallas"),
        mesh=mesh(sp=2),
        in_specs=SPLIT,
        out_specs=SPLIT,
    )
    with pytest.raises(rs.UnsupportedError, match="check_vma=False"):
        checked(x.astype(np.float32))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(rs.UnsupportedError, match="for TPUs, not for gpu"):
        sharded_ring_attention(x, x, x, mesh=mesh(sp=2), kernel="pallas")


def lowered(on, dtype, size: int, **options):
    return both_passes(on, 2048, (8, 2), size, dtype, kernel="pallas", **options)


CASES = [
    (jnp.bfloat16, 128, {"query_chunk": 256, "key_chunk": 512}),
    (
        jnp.float32,
        64,
        {"mask": "documents:1000,3048,48", "softcap": 20.0, "query_chunk": 128},
    ),
    (jnp.bfloat16, 64, {"mask": "window:300", "layout": "contiguous"}),
]


@pytest.mark.parametrize(("dtype", "size", "options"), CASES)
def test_it_lowers_to_the_language_of_a_tpu(dtype, size, options):
    text = lowered(mesh(sp=2), dtype, size, **options).as_text()
    for name in ("forward", "backward_queries", "backward_keys"):
        assert re.search(rf"@tpu_custom_call.*kernel_name = \"{name}\"", text)


def test_chunks_that_do_not_fill_registers_are_refused():
    with pytest.raises(
        rs.UnsupportedError,
        match="a multiple of 128 queries and 16 keys, these have 64 and 256",
    ):
        lowered(mesh(sp=2), jnp.float32, 64, query_chunk=64)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "size", "options"), CASES)
def test_the_tpu_compiler_overlaps_transfers_with_kernels(dtype, size, options):
    pytest.importorskip(
        "libtpu", reason="needs jax[tpu], with which JAX compiles for TPUs anywhere"
    )
    messages = covered_messages(
        lowered(tpus("v5e:2x2"), dtype, size, **options).compile().as_text()
    )
    assert len(messages) >= 3 and all(messages)
