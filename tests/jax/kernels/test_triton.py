"""JAX's ring with our Triton programs, in Triton's interpreter, against the float64 oracle; and, where jax-triton and
JAX's CUDA plugin are installed, lowered for a GPU that is not there.
"""

import sys
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")
pytest.importorskip("triton")

import jax
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.core.names import LAYOUT_NAMES
from ringspan.gpu.table import GRAIN
from ringspan.jax import sharded_ring_attention
from ringspan.jax.program import compile_tables
from tests.cases import long
from tests.core.strategies import lengths, masks
from tests.fuzz import examples
from tests.jax import standins
from tests.jax.rings import attention_and_gradients, mesh
from tests.jax.test_attention import (
    arrays,
    check_any_mask,
    check_as_good_as_xla,
    check_same_as_xla,
)
from tests.torch.engine.attention.test_ring import Problem
from tests.torch.engine.kernels.test_triton import without_interpreter

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU"
)


@pytest.fixture(autouse=True)
def jax_triton():
    with standins.jax_triton():
        yield


@given(
    short=st.integers(0, 7),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.sampled_from([1, 2]),
)
@examples(
    2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_any_mask_on_any_layout(short, mask, layout, ranks):
    check_any_mask(20, short, mask, layout, ranks, (0, 0), "triton")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "ranks", "mask", "keys", "options"),
    [
        (
            "zigzag",
            2,
            rs.causal(),
            None,
            {"scale": -0.5, "softcap": 1.5, "sinks": np.array([0.3, -2.0], np.float32)},
        ),
        *long(
            ("contiguous", 2, rs.full(), 40, {"scale": -0.5}),
            ("striped", 1, rs.documents([9, 40, 11, 12]), None, {}),
        ),
    ],
    ids=["sinks and softcap", "cross-attention", "several blocks"],
)
def test_it_computes_what_the_other_kernel_does(layout, ranks, mask, keys, options):
    problem = Problem(72, mask, keys=keys, batch=2, heads=2, groups=1, size=20)
    check_same_as_xla("triton", problem, layout, ranks, **options)


@pytest.mark.long
def test_half_precision_is_as_good_as_the_other_kernel():
    """float16, since the interpreter multiplies bfloat16 numbers as if they were integers."""
    check_as_good_as_xla("triton", torch.float16, 64, 16)


def test_a_block_is_one_launch_and_two_in_backward():
    standins.launched.clear()
    problem, mask = (
        Problem(48, rs.documents([3, 9, 4, 7, 1, 12, 5, 7]), heads=1, groups=1),
        rs.documents([48]),
    )
    attention_and_gradients(
        *arrays(problem), rs.Layout("striped", 48, 1), mask, kernel="triton"
    )
    assert sorted(standins.launched) == ["backward_keys", "backward_queries", "forward"]


@given(
    length=lengths,
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.integers(1, 5),
)
@examples(60)
def test_the_tables_hold_exactly_the_allowed_pairs(length, mask, layout, ranks):
    split = rs.Layout(layout, length, ranks)
    tables, tokens = compile_tables(split, split, mask), split.tokens_per_rank
    i, j = np.indices((tokens, tokens))
    for rank in range(ranks):
        for hop in range(ranks):
            owner, row = (
                (rank - tables.direction * hop) % ranks,
                tables.which[rank, hop],
            )
            expected = mask.dense(split.positions(rank), split.positions(owner))
            expected &= (split.positions(rank) < length)[:, None] & (
                split.positions(owner) < length
            )
            counts = np.zeros((tokens, tokens), dtype=np.int64)
            for lists in ("rows", "keys"):
                first, which = (
                    getattr(tables, f"{name}_of_{lists}")[row]
                    for name in ("first", "which")
                )
                assert len(first) == -(-tokens // GRAIN) + 1
                for grain, (start, stop) in enumerate(pairwise(first)):
                    here = (i if lists == "rows" else j) // GRAIN == grain
                    for q0, q1, k0, k1, lo, hi in tables.tiles[row][which[start:stop]]:
                        inside = (i >= q0) & (i < q1) & (j >= k0) & (j < k1)
                        distance = (i - q0) - (j - k0)
                        counts += inside & (distance >= lo) & (distance <= hi) & here
            np.testing.assert_array_equal(counts, 2 * expected)


def test_what_it_cannot_do_is_refused_by_name(monkeypatch):
    def attention(dtype, size):
        x = np.zeros((1, 2, 16, size), dtype)
        return sharded_ring_attention(x, x, x, mesh=mesh(sp=2), kernel="triton")

    with pytest.raises(
        rs.UnsupportedError,
        match=r"at most 128 numbers in float32, these have 320; use kernel='xla'",
    ):
        attention(np.float32, 320)
    with pytest.raises(
        rs.UnsupportedError, match="at most 256 numbers in float16, these have 320"
    ):
        attention(np.float16, 320)
    with (
        jax.enable_x64(True),
        pytest.raises(rs.UnsupportedError, match="float16 and float32, not float64"),
    ):
        attention(np.float64, 16)
    monkeypatch.delitem(sys.modules, "jax_triton")
    if not find_spec("jax_triton"):
        standins.is_installed.cache_clear()
        with pytest.raises(rs.UnsupportedError, match="jax-triton is not installed"):
            attention(np.float32, 16)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(rs.UnsupportedError, match="it is for GPUs, not for cpu"):
        attention(np.float32, 16)


LOWER = """
from functools import partial
from unittest.mock import patch

import jax, jax.numpy as jnp
from jax._src.lib import gpu_triton
from jax.sharding import PartitionSpec as P

from ringspan.jax import init_mesh, ring_attention

def both(q, k, v, dout):
    out, differentiate = jax.vjp(partial(ring_attention, kernel="triton"), q, k, v)
    return out, *differentiate(dout)

jax.config.update("jax_num_cpu_devices", 4)
split = P(None, None, "sp")
on_mesh = jax.shard_map(both, mesh=init_mesh(sp=4), in_specs=(split,) * 4, out_specs=split)
x = [jax.ShapeDtypeStruct((1, heads, 4096, 64), jnp.bfloat16) for heads in (8, 2, 2, 8)]
gpu_triton.get_compute_capability = lambda _: 90
with patch.object(jax, "default_backend", lambda: "gpu"):
    print(jax.jit(on_mesh).trace(*x).lower(lowering_platforms=("cuda",)).as_text().count("custom_call @triton"))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not (
        find_spec("jax_triton")
        and any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
    ),
    reason="needs jax-triton and JAX's CUDA plugin (pip install --no-deps jax-triton jax-cuda12-plugin)",
)
def test_it_lowers_for_gpus_that_are_not_there():
    """By jax-triton, Triton's compiler and JAX's own plugin, which need no device for it."""
    assert int(without_interpreter(LOWER)) >= 3


TUNED = """
from ringspan.jax.kernels.triton import _tuned
for name in ("forward", "backward_queries", "backward_keys"):
    for row_bytes in (256, 512):
        print(len(_tuned(name, row_bytes, 5, 9).configs), _tuned(name, row_bytes, 5, 9).keys)
"""


@pytest.mark.long
def test_every_program_has_blocks_to_choose_from():
    """On a GPU alone, so that nothing here would notice if they were looked for in the wrong place."""
    lines = without_interpreter(TUNED).splitlines()
    assert len(lines) == 6 and all(
        int(line.split()[0]) >= 3 and line.count("'") == 8 for line in lines
    )
