"""Splitting batches: every token keeps its own successor, and what cannot be honoured is refused by name."""

import pytest
import torch
from hypothesis import given
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from tests.core.strategies import layouts
from tests.torch.models import build, tokens


class Ring:
    """Stands in for a mesh: one rank of a ring, or of replicas, that needs no process group."""

    mesh_dim_names = "replicate", "ring"
    mesh, ndim = torch.arange(4).view(2, 2), 2

    def __init__(self, ranks: int, rank: int) -> None:
        self.size, self.rank = lambda: ranks, lambda: rank

    def get_group(self, axis: str) -> "Ring":
        return self


def parts(batch, ranks, **options):
    meshes: list[DeviceMesh] = [Ring(ranks, rank) for rank in range(ranks)]  # type: ignore[list-item]
    return [rs.shard_batch(batch, mesh, **options) for mesh in meshes]


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8])
def test_labels_of_any_integers_are_int64_afterwards(kind):
    ids = torch.arange(1, 7)[None]
    [part] = parts({"input_ids": ids, "labels": ids.to(kind)}, 1)
    assert part["shift_labels"].dtype == torch.int64 and part[
        "shift_labels"
    ].tolist() == [[2, 3, 4, 5, 6, -100]]


@pytest.mark.parametrize("mesh", [2, None, "ring"])
def test_what_is_no_mesh_is_refused(mesh):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for refuse in (
        lambda: rs.shard_batch({"input_ids": ids}, mesh),
        lambda: rs.parallelize(build("llama"), mesh),
    ):
        with pytest.raises(
            rs.ConfigError,
            match=rf"mesh={mesh!r} is no DeviceMesh; use mesh = rs.init_mesh",
        ):
            refuse()


@given(layouts)
def test_labels_are_shifted_before_the_permutation(layout):
    ids = torch.arange(2 * layout.length).view(2, layout.length)
    seen, names = {}, ("input_ids", "position_ids", "shift_labels")
    for part in parts(
        {"input_ids": ids, "labels": ids}, layout.ranks, layout=layout.name
    ):
        assert (
            part["input_ids"].shape
            == part["position_ids"].shape
            == part["shift_labels"].shape
        )
        for row in range(2):
            for token, position, target in zip(
                *(part[name][row].tolist() for name in names), strict=True
            ):
                if position < layout.length:
                    seen[row, position] = (token, target)
                else:
                    assert (token, target) == (1, -100)  # 0 may be a zero vector
    last = layout.length - 1
    for (row, position), (token, target) in seen.items():
        assert token == ids[row, position]
        assert target == (-100 if position == last else ids[row, position + 1])
    assert len(seen) == 2 * layout.length


PADDED = torch.tensor([[0, 0, 1, 1, 1, 0]])
# the last of them is marked as padding
SCORED = torch.tensor([[-100, -100, -100, 7, 8, 9]])


def test_a_target_is_scored_where_its_predecessor_is_no_padding():
    [part] = parts(
        {"input_ids": tokens(1, 6), "labels": SCORED, "attention_mask": PADDED}, 1
    )
    assert part["shift_labels"].tolist() == [[-100, -100, 7, 8, 9, -100]]


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        (
            "labels",
            2,
            r"labels\[0, 2\] .* attention_mask\[0, 1\] is 0; pad on the right .tokenizer.padding_side",
        ),
        (
            "shift_labels",
            5,
            r"shift_labels\[0, 5\] .*; set shift_labels\[attention_mask == 0\] = -100",
        ),
    ],
)
def test_a_target_that_padding_would_predict_raises(name, place, message):
    labels = torch.full((1, 6), -100)
    labels[0, place] = 5
    with pytest.raises(rs.UnsupportedError, match=message):
        parts({"input_ids": tokens(1, 6), name: labels, "attention_mask": PADDED}, 1)


def test_padding_on_the_left_is_a_document():
    mask = torch.tensor(
        [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]
    )
    # those of transformers without any
    batch = {"input_ids": tokens(4, 6), "attention_mask": mask}
    for more in (
        {},
        {"position_ids": torch.arange(6)},
    ):
        [part] = parts(batch | more, 1)
        assert part["document_lengths"].tolist() == [[2, 4], [6, 0], [1, 5], [6, 0]]
        assert part["position_ids"].tolist() == [[*range(6)]] * 4
        assert (
            torch.equal(part["real_tokens"], mask != 0) and part["sequence_length"] == 6
        )
        assert part["position_ids"].dtype == torch.int32
    # As transformers' generate makes them.
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)[:1]
    first = {name: x[:1] for name, x in batch.items()}
    [given] = parts(first | {"position_ids": positions}, 1)
    assert given["document_lengths"].tolist() == [[1, 1, 4]]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]
)
def test_ones_and_zeros_of_any_dtype_mark_padding(dtype):
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    expected, found = (
        parts({"input_ids": tokens(2, 5), "attention_mask": m}, 1)
        for m in (mask, mask.to(dtype))
    )
    assert all(torch.equal(expected[0][name], found[0][name]) for name in expected[0])


@pytest.mark.parametrize(
    "said",
    [
        {"cu_seq_lens_q": torch.tensor([0, 2, 5, 8])},
        {"seq_idx": torch.tensor([[7, 7, 0, 0, 0, 1, 1, 1]])},
    ],
)
def test_documents_behind_padding_stay_apart(said):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    [part] = parts(
        {
            "input_ids": tokens(1, 8),
            "attention_mask": mask,
            "cu_seq_lens_k": torch.tensor([0, 2, 5, 8]),
        }
        | said,
        1,
    )
    assert part["document_lengths"].tolist() == [[2, 3, 3]] and part[
        "position_ids"
    ].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize(
    ("change", "places"),
    [
        ({"input_ids": tokens(1, 6, seed=2)}, {0}),
        ({"labels": tokens(1, 6, seed=2)}, {1}),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}, {3}),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, {2}),
    ],
    ids=str,
)
def test_the_digest_of_a_batch_depends_on_content_not_on_rank(change, places):
    whole = {"input_ids": tokens(1, 6), "labels": tokens(1, 6)}
    same, changed = (
        torch.stack([part["batch_digest"] for part in parts(one, 3)])
        for one in (whole, whole | change)
    )
    assert (
        same.shape == (3, 4)
        and (same == same[0]).all()
        and (changed == changed[0]).all()
    )
    assert {
        number for number in range(4) if same[0][number] != changed[0][number]
    } == places


ENDS, INDEX = (
    torch.tensor([0, 3, 6], dtype=torch.int32),
    torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32),
)


@pytest.mark.parametrize(
    "said",
    [
        {"cu_seq_lens_q": torch.tensor([0, 3, 3, 6, 6, 6])},  # of a fixed size
        {
            "cu_seq_lens_k": ENDS,
            "max_length_k": 3,
            "attention_mask": None,
            "token_type_ids": None,
        },
        {
            "cu_seq_lens_q": ENDS,
            "cu_seq_lens_k": ENDS,
            "max_length_q": torch.tensor(3),
            "seq_idx": INDEX,
        },
        {
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
            "seq_idx": INDEX,
            "max_length_q": 3,
        },
    ],
    ids=lambda said: "+".join(said),
)
def test_what_collators_say_of_a_flattened_row_is_its_documents(said):
    whole = {"input_ids": tokens(1, 6), "labels": tokens(1, 6)}
    expected = parts(whole | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, 2)
    for part, found in zip(expected, parts(whole | said, 2), strict=True):
        assert part.keys() == found.keys()
        assert all(torch.equal(part[name], found[name]) for name in part)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"cu_seq_lens_q": ENDS[:2]},
            "cu_seq_lens_q must begin with 0 and end with 6, .*; got 0 to 3",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0.0, 2.5, 6.0])},
            "cu_seq_lens_q must be integers, got torch.float32",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 3, 2, 6])},
            "cu_seq_lens_q must not decrease, as behind entry 1",
        ),
        (
            {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": torch.tensor([0, 3, 4, 6])},
            "cu_seq_lens_q and cu_seq_lens_k say different documents, 2 and 3: number 1 .from 0. has 3 and 1 tokens",
        ),
        (
            {"cu_seq_lens_q": ENDS, "max_length_q": 4},
            "max_length_q=4, the longest document has 3 tokens",
        ),
        (
            {"cu_seq_lens_q": ENDS, "position_ids": torch.arange(6)[None]},
            "position_ids and cu_seq_lens_q say different",
        ),
        ({"seq_idx": INDEX[:, :4]}, "seq_idx has shape"),
        ({"max_length_q": 3}, "max_length_q also needs position_ids or"),
        (
            {"input_ids": tokens(2, 3), "cu_seq_lens_q": ENDS},
            "flattened into one row, input_ids has 2",
        ),
    ],
    ids=str,
)
def test_a_flattened_row_whose_documents_are_unclear_is_refused(said, message):
    with pytest.raises(rs.UnsupportedError, match=message):
        parts({"input_ids": tokens(1, 6)} | said, 2)


@pytest.mark.parametrize("both", [False, True])
def test_shifted_labels_are_taken_as_they_are(both):
    ids = tokens(1, 6)
    labels = {"labels": torch.cat((ids[:, :1], ids[:, :-1] + 1), 1)} if both else {}
    [part] = parts({"input_ids": ids, "shift_labels": ids + 1} | labels, 1)
    assert torch.equal(part["shift_labels"], ids + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention_mask": torch.tensor([[0, 1, 0, 1]])},
            r"attention_mask\[0, 2:3\] is 0 between .* labels of -100",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 2, 2]])},
            "attention_mask has 2; it may have 1 for tokens and 0 for",
        ),
        (
            {"attention_mask": torch.tensor([[0.0, 0.0, -1e9, -1e9]])},
            r"attention_mask has -1e\+09; it may have",
        ),
        (
            {"attention_mask": torch.tensor([[1.0, 1.0, 1.0, torch.nan]])},
            "attention_mask has nan; it may have",
        ),
        (
            {"attention_mask": torch.ones(1, 1, 4, 4)},
            r"attention_mask has shape .* position_ids that start from 0",
        ),
        (
            {
                "attention_mask": torch.tensor([[0, 0, 1, 1]]),
                "position_ids": torch.tensor([[0, 0, 1, 0]]),
            },
            "position_ids must start a document behind padding on the left",
        ),
        (
            {
                "attention_mask": torch.tensor([[0, 1, 1, 1]]),
                "cu_seq_lens_q": torch.tensor([0, 4]),
            },
            "cu_seq_lens_q must start a document behind padding on the left",
        ),
        ({"position_ids": torch.tensor([[0, 1, 3, 4]])}, "count up by one"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "from 0 at the start"),
        ({"position_ids": torch.tensor([[0, 1]])}, "position_ids has shape"),
        (
            {"position_ids": torch.arange(4).expand(3, 1, 4)},
            "have a time, a row and a column; leave them out",
        ),
        (
            {"second_per_grid_ts": "x"},
            "second_per_grid_ts must be a tensor or a list of numbers, got a str",
        ),
        (
            {"second_per_grid_ts": [1.0, None]},
            "second_per_grid_ts must be a tensor or a list of numbers, got a list",
        ),
        (
            {"second_per_grid_ts": [[1.0]]},
            "second_per_grid_ts must be a number of each video",
        ),
        (
            {"image_grid_thw": torch.tensor([1, 2, 2])},
            r"image_grid_thw must be whole numbers .*of shape .images, 3.",
        ),
        (
            {"video_grid_thw": torch.tensor([[1.0, 2.0, 2.0]])},
            r"video_grid_thw must be whole numbers .*got ..1.0, 2.0",
        ),
        ({"task_type_ids": torch.zeros(1, 4)}, "task_type_ids"),
        ({"labels": torch.zeros(1, 3)}, "labels has shape"),
        ({"input_ids": torch.zeros(4)}, "input_ids must be"),
        ({"labels": torch.zeros(1, 4)}, r"labels must be integers, got torch\.float32"),
        ({"shift_labels": torch.zeros(1, 4).bool()}, "shift_labels must be integers"),
        (
            {"labels": tokens(1, 4), "shift_labels": tokens(1, 4)},
            "labels, shifted by one, are not shift_labels",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(change, message):
    with pytest.raises(rs.UnsupportedError, match=message):
        parts({"input_ids": tokens(1, 4)} | change, 2)


@given(layouts)
def test_shards_of_a_wrong_length_are_refused(layout):
    with pytest.raises(rs.LayoutError, match="entries"):
        rs.shard(torch.zeros(layout.length + 1), layout, 0, 0)
    with pytest.raises(rs.LayoutError, match="entries"):
        rs.unshard(torch.zeros(layout.tokens_per_rank + 1), layout, None, 0)


def gather_differently(mesh: DeviceMesh, what: str) -> None:
    odd = mesh.get_rank() == 1
    layout = rs.Layout("zigzag", 16, 2)
    if what == "runs":
        layout = rs.CustomLayout.of(
            [[(8, 8)], [(0, 8)]] if odd else [[(0, 8)], [(8, 8)]]
        )
    x = torch.zeros(
        2 if odd and what == "shape" else 1,
        8,
        dtype=torch.int32 if odd and what == "dtype" else None,
    )
    rs.unshard(x, layout, mesh["ring"], 1)


@pytest.mark.parametrize("what", ["runs", "shape", "dtype"])
def test_ranks_that_would_assemble_tensors_differently_raise(pool, what):
    differs = "different layout" if what == "runs" else "unshard"
    for outcome in pool.outcomes(gather_differently, 2, what):
        assert isinstance(outcome, rs.PeerMismatch) and differs in str(outcome)
