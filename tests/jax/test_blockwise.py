"""The blockwise feed-forward and loss, and batches, against their plain versions."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs ringspan[jax]")

import jax
import jax.numpy as jnp

import ringspan as rs
from ringspan.jax import (
    blockwise_cross_entropy,
    blockwise_feedforward,
    init_mesh,
    shard,
    shard_batch,
    unshard,
)
from tests.cases import long


def near(a, b, limit=2e-6):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) <= limit * np.linalg.norm(
        np.asarray(b)
    )


@pytest.mark.parametrize(("tokens", "chunk"), [(37, 5), *long((37, 100), (12, 4))])
def test_cross_entropy_and_gradients_equal_the_plain_ones(tokens, chunk):
    generator = np.random.default_rng(0)
    hidden, weight = (
        generator.standard_normal(s).astype(np.float32) for s in ((tokens, 8), (19, 8))
    )
    targets = generator.integers(0, 19, tokens)
    targets[::3] = -100

    def plain(hidden, weight):
        logs = jax.nn.log_softmax(hidden @ weight.T)
        picked = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
        return -jnp.where(targets >= 0, picked, 0).sum()

    def blockwise(hidden, weight):
        return blockwise_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)

    results = [
        jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, weight)
        for f in (blockwise, plain)
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert near(a, b)


@pytest.mark.parametrize("target", [-1, 10, 999])
def test_a_target_outside_the_vocabulary_raises_or_gives_nan(target):
    hidden, weight = jnp.ones((5, 4)), jnp.ones((10, 4))
    targets = jnp.array([1, 2, target, -100, 4])
    with pytest.raises(
        rs.UnsupportedError, match=f"target {target} is no entry of a vocabulary of 10"
    ):
        blockwise_cross_entropy(hidden, weight, targets)
    loss, gradients = jax.jit(jax.value_and_grad(blockwise_cross_entropy, (0, 1)))(
        hidden, weight, targets
    )
    assert np.isnan(loss) and np.isnan(gradients[1]).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_target_of_an_unsigned_type_is_a_target(dtype):
    """In eight bits, -100 is 156; in more of them, a number behind every vocabulary."""
    generator = np.random.default_rng(0)
    hidden, weight = (
        generator.standard_normal(s).astype(np.float32) for s in ((3, 4), (200, 4))
    )
    targets = np.array([156, 1, 199])
    compiled = jax.jit(blockwise_cross_entropy)
    assert compiled(hidden, weight, targets.astype(dtype)) == compiled(
        hidden, weight, targets
    )
    if dtype != np.uint8:
        assert np.isnan(
            compiled(hidden, weight, np.array([1, 2, np.iinfo(dtype).max - 99], dtype))
        )


def test_what_tokens_without_a_target_hold_changes_nothing():
    generator = np.random.default_rng(0)
    hidden, weight = (
        generator.standard_normal(s).astype(np.float32) for s in ((7, 8), (19, 8))
    )
    targets = np.array([3, -100, 5, 0, -100, 18, 1])
    results = []
    for value in (0, np.nan):
        hidden[targets == -100] = value
        both = jax.value_and_grad(
            lambda h, w: blockwise_cross_entropy(h, w, targets, chunk_tokens=3), (0, 1)
        )
        results.append(jax.tree.leaves(jax.jit(both)(hidden, weight)))
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a).all() and np.array_equal(a, b)


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        (
            [(5, 4), (10, 4), (7,)],
            int,
            r"hidden \(5, 4\), weight \(10, 4\), targets \(7,\)",
        ),
        ([(5, 4), (10, 3), (5,)], int, "shapes do not fit"),
        ([(1, 5, 4), (10, 4), (1, 5)], int, "shapes do not fit"),
        ([(5, 4), (10, 4), (5,)], float, "targets must be integers, got float32"),
        ([(5, 4), (10, 4), (5,)], bool, "targets must be integers, got bool"),
    ],
)
def test_what_is_no_problem_of_a_loss_is_refused(shapes, dtype, message):
    hidden, weight, targets = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(rs.UnsupportedError, match=message):
        jax.jit(blockwise_cross_entropy)(hidden, weight, targets.astype(dtype))


def test_no_tokens_at_all():
    assert (
        blockwise_cross_entropy(
            jnp.zeros((0, 4)), jnp.zeros((10, 4)), jnp.zeros(0, int)
        )
        == 0
    )
    assert blockwise_feedforward(jnp.sin, jnp.zeros((2, 0, 4))).shape == (2, 0, 4)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
@pytest.mark.parametrize(
    ("value", "message"),
    [(1.5, "must be integers, got float64"), (1 << 40, "must fit int32")],
)
def test_what_int32_would_change_is_refused(name, value, message):
    batch = {"input_ids": np.ones((1, 8), int), "labels": np.ones((1, 8), int)}
    batch[name] = np.full((1, 8), value)
    with pytest.raises(rs.UnsupportedError, match=f"{name} {message}"):
        shard_batch(batch, init_mesh(sp=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "needs input_ids"),
        (
            {"input_ids": np.full((1, 8), -3)},
            "input_ids has -3, which is no entry of a vocabulary",
        ),
        (
            {"labels": [[1, 2], [3]]},
            "labels has sequences of different lengths; pad them",
        ),
        (
            {"shift_labels": np.ones((1, 8), int)},
            "labels, shifted by one, are not shift_labels",
        ),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change, message):
    batch = {"input_ids": np.ones((1, 8), int), "labels": np.arange(8)[None]} | change
    with pytest.raises(rs.UnsupportedError, match=message):
        shard_batch(
            {name: value for name, value in batch.items() if value is not None},
            init_mesh(sp=2),
        )


def test_logits_and_wide_activations_never_exist_whole():
    hidden, weight = jnp.zeros((1024, 8)), jnp.zeros((4096, 8))
    loss = jax.grad(
        lambda h, w: blockwise_cross_entropy(
            h, w, jnp.zeros(1024, int), chunk_tokens=64
        ),
        (0, 1),
    )
    assert (
        jax.jit(loss)
        .lower(hidden, weight)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        < 1024 * 4096
    )
    wide = jax.grad(
        lambda h, w: blockwise_feedforward(
            lambda x: jax.nn.silu(x @ w.T) @ w, h, chunk_tokens=64
        ).sum()
    )
    assert (
        jax.jit(wide)
        .lower(hidden, weight)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        < 1024 * 4096
    )


@pytest.mark.parametrize("chunk", [*long(1), 5, *long(100)])
def test_feedforward_and_gradients_equal_the_plain_ones(chunk):
    generator = np.random.default_rng(0)
    x, w = (
        0.3 * generator.standard_normal(s).astype(np.float32)
        for s in ((2, 11, 8), (24, 8))
    )

    def layer(rows):
        return jax.nn.silu(rows @ w.T) @ w

    def total(function):
        return lambda x: jnp.sin(function(x)).sum()

    assert near(blockwise_feedforward(layer, x, chunk_tokens=chunk), layer(x))
    gradient = jax.grad(
        total(lambda x: blockwise_feedforward(layer, x, chunk_tokens=chunk))
    )
    assert near(jax.jit(gradient)(x), jax.grad(total(layer))(x))


def test_a_function_without_derivative_at_zero_has_gradients():
    """Three tokens in chunks of two: what fills up the last chunk must not be zero."""
    x, w = np.ones((3, 4), np.float32), np.ones((4, 4), np.float32)

    def total(w):
        def directions(rows):
            return rows / jnp.linalg.norm(rows, axis=-1, keepdims=True) @ w

        return blockwise_feedforward(directions, x, chunk_tokens=2).sum()

    np.testing.assert_allclose(jax.grad(total)(w), np.full((4, 4), 1.5), rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [lambda rows: rows[:1], lambda rows: (rows, rows), lambda rows: rows.sum()],
)
def test_a_function_of_something_else_than_rows_is_refused(function):
    with pytest.raises(
        rs.UnsupportedError, match="function must map n rows to one array of n rows"
    ):
        blockwise_feedforward(function, jnp.zeros((3, 4)), chunk_tokens=2)
    with pytest.raises(rs.ConfigError, match="chunk_tokens must be at least 1, got 0"):
        blockwise_feedforward(function, jnp.zeros((3, 4)), chunk_tokens=0)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_batches_know_positions_and_successors(layout):
    tokens = np.arange(2 * 13).reshape(2, 13)
    batch = shard_batch(
        {"input_ids": tokens, "labels": tokens}, init_mesh(dp=2, sp=4), layout=layout
    )
    split = rs.Layout(layout, 13, 4)
    in_order = {name: np.asarray(unshard(x, split, 1)) for name, x in batch.items()}
    assert np.array_equal(in_order["input_ids"], tokens)
    assert np.array_equal(
        in_order["position_ids"], np.broadcast_to(np.arange(13), (2, 13))
    )
    assert np.array_equal(in_order["shift_labels"][:, :-1], tokens[:, 1:])
    assert (in_order["shift_labels"][:, -1] == -100).all()
    local = batch["position_ids"].addressable_shards[0].data  # what rank 0 holds
    assert np.array_equal(local[0], split.positions(0))
    assert (np.asarray(batch["shift_labels"]) == -100).sum() == 2 * (
        split.padded_length - 12
    )


def test_shard_and_unshard_refuse_other_lengths():
    split = rs.Layout("zigzag", 13, 2)
    with pytest.raises(rs.LayoutError, match="dimension 1 has 12 entries"):
        shard(np.zeros((2, 12)), split, 1)
    with pytest.raises(rs.LayoutError, match="dimension 1 has 13 entries"):
        unshard(np.zeros((2, 13)), split, 1)
