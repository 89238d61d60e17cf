"""JAX's ring against the float64 oracle and against PyTorch's: every mask, layout, number of ranks and grouping."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")

import jax
import jax.numpy as jnp
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import ringspan as rs
from ringspan.core.names import LAYOUT_NAMES
from ringspan.core.schedule import workspace
from ringspan.jax import ring_attention, sharded_ring_attention
from tests.cases import few, long
from tests.core.strategies import masks
from tests.fuzz import examples
from tests.jax.rings import attention_and_gradients, by_data, in_order, mesh, shards
from tests.torch.engine.attention.test_ring import FLOAT32_LIMIT, Problem, relative

TORCH_LIMIT = 1e-5
CUSTOM = rs.CustomLayout.of([[(0, 4)], [(4, 4)]])


@pytest.fixture(autouse=True)
def groups_of_heads(monkeypatch):
    """As many as there are key/value heads, though the tiles are small."""
    monkeypatch.setattr(workspace, "WORTH_A_CALL_ON_CPU", 0)


def arrays(problem: Problem) -> list[np.ndarray]:
    return [x.float().numpy() for x in (problem.q, problem.k, problem.v, problem.dout)]


def errors(problem: Problem, results: list[np.ndarray]) -> list[float]:
    return list(
        map(relative, results, (problem.out, *problem.gradients), problem.terms)
    )


def check_any_mask(
    tokens, short, mask, layout, ranks, chunks, kernel="xla"
) -> tuple[Problem, list[np.ndarray]]:
    """A ring of so many tokens per rank, of which the last may be padding, against the oracle: what it computed."""
    granularity = rs.Layout(layout, 1, ranks).granularity
    split = rs.Layout(layout, ranks * tokens - min(short, granularity - 1), ranks)
    problem = Problem(split.length, mask, heads=4, groups=2, size=8, value_size=6)
    lse, *results = by_data(*arrays(problem), split, mask, chunks, kernel)
    assert max(errors(problem, results)) < FLOAT32_LIMIT
    assert np.array_equal(np.isneginf(lse), np.isneginf(problem.lse))
    seen = ~np.isneginf(lse)
    np.testing.assert_allclose(lse[seen], problem.lse[seen], rtol=0, atol=1e-5)
    return problem, results


def check_same_as_xla(kernel, problem, layout, ranks, **options):
    split, key_split = (
        rs.Layout(layout, x.shape[2], ranks) for x in (problem.q, problem.k)
    )
    ours, expected = (
        attention_and_gradients(
            *arrays(problem), split, problem.mask, key_split, kernel=name, **options
        )
        for name in (kernel, "xla")
    )
    assert len(ours) == len(expected) == 4 + ("sinks" in options)
    for one, other in zip(ours, expected, strict=True):
        assert np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other)


def check_as_good_as_xla(kernel, dtype, tokens, size, **options):
    problem = Problem(tokens, rs.causal(), heads=4, groups=2, size=size, dtype=dtype)
    inputs = [
        jnp.asarray(x, str(dtype).removeprefix("torch.")) for x in arrays(problem)
    ]
    split = rs.Layout("zigzag", tokens, 2)
    ours, limits = (
        errors(
            problem,
            attention_and_gradients(
                *inputs, split, problem.mask, kernel=name, **options
            ),
        )
        for name in (kernel, "xla")
    )
    for error, limit in zip(ours, limits, strict=True):
        assert error < 1.1 * limit


@given(
    short=st.integers(0, 7),
    mask=masks,
    layout=st.sampled_from(LAYOUT_NAMES),
    ranks=st.sampled_from([1, 4]),
)
@examples(5, suppress_health_check=[HealthCheck.too_slow])
def test_any_mask_on_any_layout(short, mask, layout, ranks):
    # Chunks of 4 queries and 3 keys on every layout, the last ones overlapping.
    problem, results = check_any_mask(14, short, mask, layout, ranks, (4, 3))
    by_torch, _, _ = problem.on_ring(layout, ranks)
    for ours, theirs, terms in zip(
        results, (by_torch[0], *by_torch[2:]), problem.terms, strict=True
    ):
        assert relative(ours, theirs, terms) < TORCH_LIMIT


def test_cross_attention():
    problem = Problem(37, rs.full(), keys=22, batch=2, heads=3, groups=1, size=40)
    queries, keys = rs.Layout("zigzag", 37, 2), rs.Layout("zigzag", 22, 2)
    results = attention_and_gradients(
        *arrays(problem), queries, rs.full(), keys, query_chunk=7, key_chunk=5
    )
    assert max(errors(problem, results)) < FLOAT32_LIMIT


def dense(q, k, v, sinks, allowed, softcap):
    """Attention with sinks and softcap as their papers write it, in float64."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(allowed, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate((scores, sink), -1), -1)[..., :-1] @ v
    return jax.nn.softmax(scores, -1) @ v


def test_sinks_and_softcap():
    problem = Problem(43, rs.causal(), heads=4, groups=2)
    sinks = np.array([0.3, -2.0, 1.5, 4.0], np.float32)
    options = {"softcap": 0.7, "sinks": sinks, "query_chunk": 8, "key_chunk": 8}
    results = attention_and_gradients(
        *arrays(problem), rs.Layout("contiguous", 43, 2), rs.causal(), **options
    )
    allowed = rs.causal().dense(np.arange(43), np.arange(43))
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x, jnp.float64) for x in (*arrays(problem)[:3], sinks)]
        out, differentiate = jax.vjp(lambda *x: dense(*x, allowed, 0.7), *inputs)
        expected = [
            np.asarray(x)
            for x in (out, *differentiate(jnp.asarray(arrays(problem)[3], jnp.float64)))
        ]
    assert len(results) == len(expected)
    for ours, theirs in zip(results, expected, strict=True):
        assert np.linalg.norm(ours - theirs) < FLOAT32_LIMIT * np.linalg.norm(theirs)


@pytest.mark.long
@pytest.mark.parametrize("mask", [rs.causal(), rs.full()], ids=str)
def test_a_negative_scale_is_as_good_as_negative_queries(mask):
    """Scores of up to hundreds, so that any but the highest of a row as its maximum would overflow."""
    problem = Problem(48, mask, heads=2, groups=1, size=16)
    q, *others = arrays(problem)
    split = rs.Layout("zigzag", 48, 2)
    results = attention_and_gradients(
        q, *others, split, mask, scale=-20.0, query_chunk=12, key_chunk=8
    )
    expected = attention_and_gradients(
        -q, *others, split, mask, scale=20.0, query_chunk=12, key_chunk=8
    )
    expected[1] *= -1
    for ours, theirs in zip(results, expected, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-6 * np.linalg.norm(theirs)


def test_bfloat16_is_as_good_as_on_one_device():
    problem = Problem(
        256, rs.causal(), heads=4, groups=2, size=64, dtype=torch.bfloat16
    )
    inputs = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=True
    )
    alone = [
        x.detach().double().numpy()
        for x in (out, *torch.autograd.grad(out, inputs, problem.dout))
    ]
    ours = [jnp.asarray(x, jnp.bfloat16) for x in arrays(problem)]
    split = rs.Layout("zigzag", 256, 2)
    results = attention_and_gradients(
        *ours, split, rs.causal(), query_chunk=16, key_chunk=16
    )
    for error, limit in zip(
        errors(problem, results), errors(problem, alone), strict=True
    ):
        assert error < 1.4 * limit


@pytest.mark.long
def test_float64_stays_float64():
    problem = Problem(60, rs.causal(), dtype=torch.float64)
    with jax.enable_x64(True):
        inputs = [x.numpy() for x in (problem.q, problem.k, problem.v, problem.dout)]
        results = attention_and_gradients(
            *inputs, rs.Layout("zigzag", 60, 2), rs.causal(), query_chunk=8
        )
    assert max(errors(problem, results)) < 1e-13


@pytest.mark.parametrize("kernel", ["xla", *long("pallas")])
@pytest.mark.parametrize("layout", few(LAYOUT_NAMES, 3))
def test_what_padding_holds_reaches_no_token(kernel, layout):
    """The oracle knows nothing of it; on the ring it is NaN, in chunks that hold tokens too."""
    problem = Problem(39, rs.full(), heads=2, groups=1, size=8, has_sinks=True)
    split = rs.Layout(layout, 39, 4)
    # Interpreted, a kernel takes any chunks that divide a rank's tokens.
    chunk = split.tokens_per_rank if kernel == "pallas" else 4
    options = {
        "query_chunk": chunk,
        "key_chunk": chunk,
        "kernel": kernel,
        "sinks": problem.sinks.numpy(),
    }
    results = attention_and_gradients(*arrays(problem), split, problem.mask, **options)
    expected = problem.out, *problem.gradients, problem.dsinks
    assert max(map(relative, results, expected, problem.terms)) < FLOAT32_LIMIT


def test_a_row_without_keys_and_with_an_empty_sink_gives_zeros():
    mask = rs.documents([3])
    problem = Problem(12, mask, has_sinks=True)
    assert problem.sinks[-1] == -torch.inf
    sinks = problem.sinks.numpy()
    out, *gradients = attention_and_gradients(
        *arrays(problem), rs.Layout("contiguous", 12, 4), mask, sinks=sinks
    )
    assert (out[:, :, 3:] == 0).all()
    expected = problem.out, *problem.gradients, problem.dsinks
    assert (
        max(map(relative, (out, *gradients), expected, problem.terms)) < FLOAT32_LIMIT
    )


@pytest.mark.long
def test_forward_over_reverse_works_and_other_orders_raise():
    """A product with the Hessian, against that of dense attention."""
    problem = Problem(8, rs.causal(), heads=2, groups=2, size=4)
    inputs = [jnp.asarray(x) for x in arrays(problem)[:3]]
    allowed = rs.causal().dense(np.arange(8), np.arange(8))

    def on_ring(*x):
        return jnp.sin(
            sharded_ring_attention(*x, mesh=mesh(sp=2), layout="contiguous")
        ).sum()

    def alone(*x):
        return jnp.sin(dense(*x, None, allowed, None)).sum()

    ours, theirs = (
        jax.jit(lambda *x, f=f: jax.jvp(jax.grad(f, (0, 1, 2)), x, x)[1])(*inputs)
        for f in (on_ring, alone)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert np.linalg.norm(a - b) < FLOAT32_LIMIT * np.linalg.norm(b)
    with pytest.raises(TypeError):
        jax.jvp(on_ring, tuple(inputs), tuple(inputs))
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.eval_shape(
            jax.grad(lambda *x: sum(g.sum() for g in jax.grad(on_ring, (0, 1, 2))(*x))),
            *inputs,
        )


@pytest.mark.long
def test_vmap_remat_and_scan_over_layers():
    """Three layers of attention by scan, each recomputed, of a batch by vmap: gradients as without any of it."""
    problem = Problem(32, rs.causal(), batch=2, heads=2, groups=1, size=8)
    split = rs.Layout("zigzag", 32, 2)
    inputs = [shards(x, split) for x in arrays(problem)]
    options = {"query_chunk": 8, "key_chunk": 8}

    def layer(x, k, v):
        return x + ring_attention(x, k, v, **options)

    def scanned(q, k, v):
        def one(q, k, v):
            policy = jax.checkpoint_policies.save_only_these_names("ring_attention")
            step = jax.checkpoint(
                lambda x, _: (layer(x, k[None], v[None]), None), policy=policy
            )
            return jax.lax.scan(step, q[None], length=3)[0][0]

        return jax.vmap(one)(q, k, v)

    def plain(q, k, v):
        return layer(layer(layer(q, k, v), k, v), k, v)

    def gradients(function):
        spec = P(None, None, "sp")
        on_mesh = jax.shard_map(
            function, mesh=mesh(sp=2), in_specs=(spec,) * 3, out_specs=spec
        )

        @jax.jit
        def both(dout, *inputs):
            out, differentiate = jax.vjp(on_mesh, *inputs)
            return out, *differentiate(dout)

        return [np.asarray(x) for x in both(inputs[3], *inputs[:3])]

    for a, b in zip(gradients(scanned), gradients(plain), strict=True):
        assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b)


@pytest.mark.long
def test_split_batch_and_heads_sum_shared_gradients():
    """A mesh of data, tensor and sequence axes; the sinks are one array for all of them but the tensor axis."""
    problem = Problem(44, rs.causal(), batch=2, heads=4, groups=2, size=8)
    split = rs.Layout("striped", 44, 2)
    sinks = np.array([0.3, -2.0, 1.5, 4.0], np.float32)
    *inputs, dout = (shards(x, split) for x in arrays(problem))

    def results(on, sinks, *inputs):
        def attention(q, k, v, sinks):
            return sharded_ring_attention(
                q, k, v, mesh=on, layout=split, sinks=sinks, query_chunk=9, key_chunk=9
            )

        out, differentiate = jax.vjp(attention, *inputs, sinks)
        return out, *differentiate(dout)

    alone = jax.jit(lambda *x: results(mesh(sp=2), *x))(sinks, *inputs)
    split_up = jax.jit(lambda *x: results(mesh(dp=2, tp=2, sp=2), *x))(sinks, *inputs)
    for a, b in zip(map(np.asarray, split_up), map(np.asarray, alone), strict=True):
        assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b)
    # sinks do something
    assert relative(in_order(alone[0], split), problem.out, problem.terms[0]) > 0.01


def test_explicit_meshes_work_too():
    problem, split = Problem(40, rs.causal()), rs.Layout("zigzag", 40, 2)
    explicit = jax.make_mesh(
        (2,),
        ("sp",),
        devices=jax.devices()[:2],
        axis_types=(jax.sharding.AxisType.Explicit,),
    )
    inputs = [shards(x, split) for x in arrays(problem)[:3]]
    out = jax.jit(lambda *x: sharded_ring_attention(*x, mesh=explicit))(*inputs)
    assert relative(in_order(out, split), problem.out, problem.terms[0]) < FLOAT32_LIMIT


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        (
            [(1, 4, 8, 4), (1, 3, 8, 4), (1, 3, 8, 4)],
            {},
            rs.UnsupportedError,
            "3 key/value heads do not divide 4",
        ),
        ([(4, 8, 4)] * 3, {}, rs.UnsupportedError, "batch, heads, tokens, head_dim"),
        (
            [(1, 2, 8, 4), (1, 2, 8, 5), (1, 2, 8, 4)],
            {},
            rs.UnsupportedError,
            "q and k in head_dim",
        ),
        (
            [(1, 2, 6, 4)] * 3,
            {},
            rs.LayoutError,
            "zigzag needs an even number of local tokens",
        ),
        ([(1, 2, 7, 4)] * 3, {}, rs.LayoutError, "7 entries"),
        (
            [(1, 2, 8, 4)] * 3,
            {"layout": "spiral"},
            rs.LayoutError,
            "unknown layout 'spiral'",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"layout": rs.Layout("zigzag", 12, 3)},
            rs.LayoutError,
            "for 3 ranks",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"mask": "diagonal"},
            rs.MaskError,
            "unknown mask 'diagonal'",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"softcap": 0.0},
            rs.UnsupportedError,
            "softcap must be positive",
        ),
        ([(1, 2, 8, 4)] * 3, {"key_chunk": 0}, rs.UnsupportedError, "key_chunk"),
        (
            [(1, 2, 8, 4)] * 3,
            {"sinks": np.zeros(3, np.float32)},
            rs.UnsupportedError,
            "each of the 2 query heads",
        ),
        ([(1, 2, 8, 4)] * 3, {"axis_name": "ring"}, rs.LayoutError, "no axis 'ring'"),
        (
            [(1, 2, 8, 4)] * 3,
            {"key_chunk": 2.5},
            rs.UnsupportedError,
            "key_chunk must be an integer, got 2.5",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"mask": rs.causal},
            rs.MaskError,
            r"call it, as in mask=rs\.causal\(\)",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"mask": np.ones((8, 8))},
            rs.MaskError,
            "cannot be split over ranks",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"scale": "1"},
            rs.UnsupportedError,
            "scale must be a plain number",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"layout": 3},
            rs.LayoutError,
            "layout must be a name or a Layout, got 3",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"key_layout": "zigzag"},
            rs.LayoutError,
            "key_layout must be a Layout or None",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"key_layout": rs.Layout("striped", 8, 2)},
            rs.LayoutError,
            "make them equal",
        ),
        (
            [(1, 2, 8, 4)] * 3,
            {"layout": CUSTOM},
            rs.UnsupportedError,
            "not supported in JAX, where one program serves",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(shapes, options, error, message):
    with pytest.raises(error, match=message):
        sharded_ring_attention(
            *(np.zeros(shape, np.float32) for shape in shapes),
            mesh=mesh(sp=2),
            **options,
        )


def test_what_is_no_mesh_or_outside_of_one_is_refused():
    x = np.zeros((1, 2, 8, 4), np.float32)
    with pytest.raises(
        rs.LayoutError, match=r"mesh must be a jax\.sharding\.Mesh, got 2"
    ):
        sharded_ring_attention(x, x, x, mesh=2)
    with pytest.raises(
        rs.LayoutError, match=r"call ring_attention inside jax\.shard_map"
    ):
        ring_attention(x, x, x)
    with pytest.raises(rs.UnsupportedError, match=r"q must be an array, got \[1\]"):
        ring_attention([1], x, x)
    with pytest.raises(rs.UnsupportedError, match="dtype int32"):
        sharded_ring_attention(*(x.astype(np.int32),) * 3, mesh=mesh(sp=2))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_arrays_that_are_the_same_on_all_ranks_are_refused(name):
    """Their tokens were not split: the sequence would be two copies of them."""
    split = P(None, None, "sp")
    specs = tuple(P() if each == name else split for each in "qkv")
    on_mesh = jax.shard_map(
        ring_attention, mesh=mesh(sp=2), in_specs=specs, out_specs=split
    )
    whole, part = np.zeros((1, 2, 4, 4), np.float32), np.zeros((1, 2, 8, 4), np.float32)
    with pytest.raises(
        rs.LayoutError, match=rf"^{name} is the same on all 2 devices of mesh axis 'sp'"
    ):
        on_mesh(*(whole if each == name else part for each in "qkv"))
