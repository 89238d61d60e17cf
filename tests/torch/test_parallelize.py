"""Hugging Face models on the ring against themselves on one process: logits, loss and every gradient."""

import gc
import weakref
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

import ringspan as rs
from ringspan.core.geometry.balanced import batch_layout
from ringspan.torch.engine.transport.exchange import COUNTERS
from ringspan.torch.model.support import refuse_config, refuse_unsupported
from ringspan.torch.model.view import view_of
from tests.cases import few, long
from tests.torch.models import (
    build,
    check,
    close_by_name,
    relative,
    step,
    tokens,
    whole_gradients,
)


def labelled(batch: int, length: int, labels: str) -> tuple[Tensor, Tensor]:
    ids = tokens(batch, length)
    # only the first tokens count: the last ranks of a contiguous layout have no target at all
    targets = ids.clone()
    if labels == "few":
        targets[:, 5:] = -100
    return ids, targets


def ring_step(
    mesh: DeviceMesh,
    kind: str,
    layout: str,
    length: int,
    batch: int,
    accumulate: int,
    options: Any,
) -> Any:
    labels, documents = options.pop("labels", "all"), options.pop("documents", None)
    changes = options.pop("changes", {})
    replicate = mesh["replicate"].size()
    model = rs.parallelize(build(kind, **changes), mesh, layout=layout, **options)
    ids, targets = labelled(batch * replicate * accumulate, length, labels)
    count = int((targets[:, 1:] != -100).sum())
    rows = torch.arange(len(ids)).view(accumulate, replicate, batch)[
        :, mesh["replicate"].get_local_rank()
    ]
    last = [documents[row] if documents else None for row in rows[-1]]
    splits = [batch_layout(layout, length, mesh["ring"].size(), row) for row in last]
    loss = torch.zeros(())
    for number in range(accumulate):
        whole_batch = {"input_ids": ids[rows[number]], "labels": targets[rows[number]]}
        if documents:
            whole_batch["position_ids"] = restarting(documents)[rows[number]]
        part = rs.shard_batch(whole_batch, mesh, layout=layout)
        if accumulate > 1:
            part["num_items_in_batch"] = count
        loss_step = model(**part, labels=None, attention_mask=None).loss
        loss_step.backward()
        loss = loss + loss_step.detach()
    gradients = whole_gradients(model)
    with torch.no_grad():
        inputs = {
            name: part[name]
            for name in ("input_ids", "position_ids", "document_lengths")
            if name in part
        }
        parts = zip(model(**inputs).logits.split(1), splits, strict=True)
        logits = torch.cat(
            [
                rs.unshard(part, split, mesh["ring"].get_group(), 1)
                for part, split in parts
            ]
        )
    return {"loss": loss, "logits": logits, "gradients": gradients, "rows": rows[-1]}


def restarting(documents: list[list[int]]) -> Tensor:
    """Position ids that start from 0 for each document."""
    return torch.stack(
        [
            torch.cat([torch.arange(length) for length in lengths])
            for lengths in documents
        ]
    )


def one_step(
    kind: str,
    length: int,
    batch: int,
    labels: str = "all",
    documents: Any = None,
    changes: Any = None,
) -> Any:
    model = build(kind, **changes or {})
    ids, targets = labelled(batch, length, labels)
    if documents:  # each alone: not every model of transformers tells its masks of packed positions
        parts = [
            row.split(lengths) for row, lengths in zip(ids, documents, strict=True)
        ]
        logits = torch.stack(
            [
                torch.cat([model(input_ids=part[None]).logits[0] for part in row])
                for row in parts
            ]
        )
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    else:
        out = model(input_ids=ids, labels=targets)
        logits, loss = out.logits, out.loss
    loss.backward()
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


def check_steps(results: list[Any], expected: Any) -> None:
    for result in results:
        assert relative(result["loss"], expected["loss"]) < 1e-6
        assert relative(result["logits"], expected["logits"][result["rows"]]) < 1e-5
        close_by_name(result["gradients"], expected["gradients"])


CASES = [
    # kind, ranks, replicate, layout, length, batch, accumulate, options
    ("llama", 3, 1, "zigzag", 50, 1, 1, {"checkpoint": "none"}),
    (
        "llama",
        2,
        1,
        "contiguous",
        41,
        1,
        1,
        {"checkpoint": "full", "loss_chunk_tokens": 5},
    ),
    ("llama", 4, 2, "zigzag", 37, 1, 2, {}),
    ("llama", 4, 1, "zigzag", 3, 1, 1, {}),  # two ranks hold nothing but padding
    *long(("llama-tied", 3, 1, "zigzag", 31, 1, 1, {})),
    ("gemma2", 3, 1, "striped", 33, 1, 1, {}),
    ("deepseek_v3", 2, 1, "zigzag", 37, 1, 1, {}),
    (
        "granite",
        2,
        1,
        "striped",
        37,
        1,
        1,
        {"loss_chunk_tokens": 5, "loss_chunk_vocabulary": 31},
    ),
    ("gpt2", 2, 1, "zigzag", 37, 2, 1, {}),
    *long(
        ("gemma3", 2, 1, "zigzag", 37, 1, 1, {"layers_per_checkpoint": 2}),
        (
            "gemma4_text",
            2,
            1,
            "striped",
            37,
            1,
            1,
            {"checkpoint": "full", "documents": [[17, 20]]},
        ),
        # whose pad token is a zero vector
        (
            "gemma3n_text",
            2,
            1,
            "zigzag",
            37,
            1,
            1,
            {"documents": [[10, 27]]},
        ),
    ),
    (
        "llama",
        2,
        2,
        "striped",
        30,
        2,
        1,
        {"documents": [[9, 21], [30], [3, 3, 24], [3, 3, 24]]},
    ),
    *long(("gpt_oss", 4, 1, "zigzag", 41, 1, 1, {"route": "ulysses:2"})),
    ("gpt_oss", 3, 1, "zigzag", 41, 1, 1, {"route": "pass-q"}),
    ("llama", 4, 1, "striped", 37, 1, 1, {"route": "ulysses", "documents": [[16, 21]]}),
    ("mistral-window", 4, 2, "balanced", 40, 1, 1, {"documents": [[25, 15], [3, 37]]}),
    (
        "llama",
        3,
        1,
        "balanced",
        50,
        3,
        1,
        {"documents": [[5, 20, 1, 11, 13], [50], [49, 1]], "labels": "few"},
    ),
    (
        "llama4_text",
        4,
        1,
        "balanced",
        39,
        1,
        1,
        {"documents": [[19, 20]], "route": "pass-q"},
    ),
    *long(
        ("mistral-window", 3, 1, "zigzag", 53, 1, 1, {}),
        ("gemma3_text", 3, 1, "zigzag", 45, 1, 1, {}),
        ("gpt_oss", 3, 1, "zigzag", 41, 2, 1, {}),
        ("llama4_text", 3, 1, "zigzag", 47, 1, 1, {}),
        ("llama", 2, 2, "striped", 23, 1, 1, {"labels": "few"}),
        ("llama", 4, 1, "contiguous", 9, 2, 1, {"labels": "few"}),
        ("llama", 3, 1, "striped", 43, 2, 3, {}),
        ("mistral-window", 4, 1, "contiguous", 61, 1, 1, {"checkpoint": "full"}),
        ("qwen3-window", 2, 1, "zigzag", 37, 1, 1, {}),
        (
            "mistral-window",
            4,
            1,
            "contiguous",
            40,
            2,
            1,
            {"documents": [[25, 15], [25, 15]]},
        ),
        ("llama4_text", 4, 1, "zigzag", 39, 1, 1, {"documents": [[19, 20]]}),
        ("llama", 4, 1, "zigzag", 37, 1, 1, {"route": "all-gather"}),
        (
            "llama",
            3,
            1,
            "balanced",
            50,
            1,
            2,
            {"documents": [[5, 20, 1, 11, 13], [50]], "labels": "few"},
        ),
        (
            "llama4_text",
            2,
            2,
            "balanced",
            39,
            2,
            1,
            {"documents": [[19, 20], [39], [19, 20], [2, 30, 7]]},
        ),
        (
            "gpt_oss",
            2,
            1,
            "balanced",
            37,
            1,
            1,
            {"documents": [[17, 20]], "route": "all-gather"},
        ),
    ),
]


@pytest.mark.parametrize(
    (
        "kind",
        "ranks",
        "replicate",
        "layout",
        "length",
        "batch",
        "accumulate",
        "options",
    ),
    CASES,
)
def test_a_model_on_the_ring_equals_itself_on_one_process(
    pool, kind, ranks, replicate, layout, length, batch, accumulate, options
):
    truth = options.get("labels", "all"), options.get("documents")
    expected = one_step(kind, length, batch * replicate * accumulate, *truth)
    case = kind, layout, length, batch, accumulate, options
    check_steps(pool.run(ring_step, ranks, *case, replicate=replicate), expected)


def test_packed_documents_change_the_result():
    """What the packed cases are compared with does keep documents apart."""
    apart, together = (
        one_step("llama", 37, 1, "all", [[5, 20, 1, 11]]),
        one_step("llama", 37, 1),
    )
    assert relative(apart["loss"], together["loss"]) > 1e-4


def bytes_of_a_step(mesh: DeviceMesh, layout: str, documents: list[int]) -> int:
    """Bytes that this rank sends in a step's attention, on a batch of its replica's own."""
    model = rs.parallelize(build("llama"), mesh, layout=layout)
    ids = tokens(1, sum(documents)) + mesh["replicate"].get_local_rank()
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    batch = rs.shard_batch(
        {"input_ids": ids, "labels": ids, "position_ids": positions},
        mesh,
        layout=layout,
    )
    before = COUNTERS.sent_bytes
    model(**batch).loss.backward()
    return COUNTERS.sent_bytes - before


@pytest.mark.parametrize(
    ("layout", "documents", "is_silent"),
    [
        ("balanced", [10, 6, 6, 10], True),
        ("balanced", [30, 2], False),
        ("zigzag", [10, 6, 6, 10], False),
    ],
)
def test_replicas_whose_documents_fit_on_ranks_send_no_block(
    pool, layout, documents, is_silent
):
    sent = pool.run(bytes_of_a_step, 4, layout, documents, replicate=2)
    assert [number == 0 for number in sent] == [is_silent] * 4


def bfloat16_step(mesh: DeviceMesh, changes: dict[str, Any]) -> Any:
    return step(
        rs.parallelize(build("llama", **changes), mesh, compute_dtype=torch.bfloat16),
        mesh,
        64,
    )


@pytest.mark.parametrize(
    ("ranks", "tp", "changes"), [(2, 1, {}), (4, 2, {"vocab_size": 98})]
)
def test_bfloat16_computing_keeps_float32_weights(pool, ranks, tp, changes):
    check(
        pool.run(bfloat16_step, ranks, changes, tp=tp),
        step(build("llama", **changes), length=64),
        (5e-3, 5e-2),
    )


def autocast_step(mesh: DeviceMesh, inside: bool, options: dict[str, Any]) -> Any:
    model = rs.parallelize(build("llama"), mesh, **options)
    ids = tokens(1, 64)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return loss.detach(), whole_gradients(model)


CHUNKS: dict[str, Any] = {
    "feedforward_chunk_tokens": 5,
    "norm_chunk_tokens": 7,
    "loss_chunk_tokens": 9,
}


@pytest.mark.parametrize(
    ("inside", "options"),
    [(True, {"checkpoint": "none"}), (False, CHUNKS | {"layers_per_checkpoint": 2})],
)
def test_autocast_computes_in_bfloat16_and_loses_no_gradient(pool, inside, options):
    """``q`` and ``k`` come out of the rotation in float32 there, ``v`` in bfloat16."""
    found, expected = (
        pool.run(autocast_step, 2, inside, options),
        step(build("llama"), length=64),
    )
    check(found, expected, (5e-3, 5e-2))
    assert all(relative(loss, expected[0]) > 1e-7 for loss, _ in found)


def misuse(mesh: DeviceMesh, how: str) -> None:
    model = rs.parallelize(build("llama"), mesh, layout="striped")
    ids = tokens(1, 16)
    whole_batch = {"input_ids": ids, "labels": ids}
    match how:
        case "other layout":
            model(**rs.shard_batch(whole_batch, mesh, layout="zigzag"))
        case "whole batch":
            model(**whole_batch)
        case "no positions":
            model(input_ids=ids)
        case "images":
            model(
                **rs.shard_batch(whole_batch, mesh, layout="striped"),
                pixel_values=torch.zeros(1, 3, 8, 8),
            )
        case "no documents":
            balanced = rs.parallelize(build("llama"), mesh, layout="balanced")
            part = rs.shard_batch({"input_ids": ids}, mesh, layout="balanced")
            balanced(input_ids=part["input_ids"], position_ids=part["position_ids"])
        case "twice":
            rs.parallelize(model, mesh)
        case name:
            model(
                **rs.shard_batch(whole_batch, mesh, layout="striped"),
                **{name: name != "return_dict"},
            )


def spoiled_on_one_rank(mesh: DeviceMesh, name: str, value: int) -> None:
    model = rs.parallelize(build("llama"), mesh)
    ids = tokens(2, 16)
    part = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    if (mesh["replicate"].get_local_rank(), mesh["ring"].get_local_rank()) == (0, 1):
        part[name][1, 3] = value
    model(**part)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("other layout", rs.LayoutError, "layout='striped'"),
        ("whole batch", rs.UnsupportedError, "rs.shard_batch"),
        ("no positions", rs.UnsupportedError, "rs.shard_batch"),
        ("no documents", rs.UnsupportedError, "document_lengths"),
        ("images", rs.UnsupportedError, "pixel_values"),
        ("use_cache", rs.UnsupportedError, "use_cache=True"),
        ("output_hidden_states", rs.UnsupportedError, "output_hidden_states=True"),
        ("return_dict", rs.UnsupportedError, "return_dict=False"),
        ("twice", rs.UnsupportedError, "LlamaForCausalLM is on a ring already"),
    ],
)
def test_what_a_model_on_the_ring_does_not_do_is_refused(pool, how, error, message):
    for outcome in pool.outcomes(misuse, 2, how):
        assert isinstance(outcome, error) and message in str(outcome)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("position_ids", 9, rs.LayoutError, "layout='zigzag'"),
        (
            "input_ids",
            97,
            rs.UnsupportedError,
            "input_ids has numbers outside of the vocabulary, 0 to 96",
        ),
        ("input_ids", -100, rs.UnsupportedError, "input_ids"),
        ("shift_labels", 97, rs.UnsupportedError, "labels has numbers"),
    ],
)
def test_a_batch_that_is_wrong_on_one_rank_raises_on_all(
    pool, name, value, error, message
):
    for outcome in pool.outcomes(spoiled_on_one_rank, 4, name, value, replicate=2):
        assert isinstance(outcome, error) and message in str(outcome)


def train_only(model: Any, part: str) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


def frozen_step(mesh: DeviceMesh, part: str, options: dict[str, Any]) -> Any:
    return step(rs.parallelize(train_only(build("llama"), part), mesh, **options), mesh)


@pytest.mark.parametrize(
    ("part", "options"),
    few(
        zip(
            ["layers.1", "v_proj", "q_proj", "norm", "lm_head", "down_proj"],
            cycle([{}, {"checkpoint": "none", "feedforward_chunk_tokens": 5}]),
        ),
        every=3,
    ),
)
def test_frozen_weights_get_no_gradient_and_the_others_theirs(pool, part, options):
    check(
        pool.run(frozen_step, 3, part, options), step(train_only(build("llama"), part))
    )


def late_weights_step(mesh: DeviceMesh, kind: str, kernel: str) -> Any:
    """A step of a model that is split before it has weights; rank 0 gives them to the others."""
    plain = build(kind)
    with torch.device("meta"):
        model: Any = type(plain)(plain.config)
    model = rs.parallelize(model, mesh, kernel=kernel, feedforward_chunk_tokens=0)
    model.to_empty(device="cpu")
    weights = plain.state_dict() if mesh.get_rank() == 0 else {}
    # those of rotary positions
    set_model_state_dict(
        model,
        weights,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for buffer, given in zip(model.buffers(), plain.buffers(), strict=True):
        buffer.copy_(given)
    return step(model, mesh)


@pytest.mark.parametrize(("kind", "tp"), [("llama", 1), ("llama-tied", 2)])
@pytest.mark.parametrize("kernel", ["auto", *long("cpu")])
def test_a_model_may_get_its_weights_after_it_is_split(pool, kind, tp, kernel):
    # All of the world is given weights.
    check(pool.run(late_weights_step, 4, kind, kernel, tp=tp), step(build(kind)))


ONE_LAYER = {"num_hidden_layers": 1}


def compiled_step(mesh: DeviceMesh, options: dict[str, Any]) -> Any:
    model = rs.parallelize(build("llama", **ONE_LAYER), mesh, **options)
    found = step(torch.compile(model, backend="eager"), mesh)
    assert counters["stats"]["unique_graphs"] > 2, "something is compiled"
    torch.compiler.reset()
    return found[0], whole_gradients(model)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"checkpoint": "none"}, {}], ids=["plain", "checkpointed"]
)
def test_a_compiled_model_computes_the_same(pool, options):
    check(pool.run(compiled_step, 2, options), step(build("llama", **ONE_LAYER)))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (
            "mistral",
            {"layer_types": ["full_attention", "compressed_sparse_attention"]},
            "compressed_sparse_attention",
        ),
        ("bert", {"is_decoder": True}, "attention_probs_dropout_prob=0.1"),
        ("t5", {}, "t5 is an encoder-decoder model"),
        ("llama", {"output_hidden_states": True}, "output_hidden_states=True"),
    ],
)
def test_models_that_would_not_be_exact_are_refused_by_name(kind, changes, message):
    model = build(kind, **changes)
    before = dict(model.named_modules())
    with pytest.raises(rs.UnsupportedError, match=message):
        refuse_unsupported(view_of(model))
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.Sequential], ids=["compiled", "wrapped"]
)
def test_a_wrapped_model_is_refused_with_what_to_give_instead(wrap):
    with pytest.raises(rs.UnsupportedError, match="give the model inside of it"):
        refuse_unsupported(view_of(wrap(build("llama"))))


def test_a_config_without_attention_is_refused_by_name():
    with pytest.raises(rs.UnsupportedError, match="rwkv has no attention heads"):
        refuse_config(AutoConfig.for_model("rwkv"))


def dropped(mesh):
    """How many parameters are left of a model that has trained a step, once nobody has it any more."""
    model = rs.parallelize(build("mixtral"), mesh)
    ids = tokens(1, 64)
    model(**rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)).loss.backward()
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    return sum(parameter() is not None for parameter in left)


def test_a_model_that_nobody_has_any_more_leaves_no_weights(pool):
    """FSDP remembers the classes that it was given; what of a model is in its class stays for ever."""
    assert pool.run(dropped, 2) == [0, 0]
