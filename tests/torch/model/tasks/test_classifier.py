"""Classifiers on a ring: logits and gradients of one process, wherever sequences end."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import ringspan as rs
from ringspan.torch.model.saving import whole_weights
from tests.cases import long
from tests.torch.models import close_by_name, config, relative, whole

PADDING = 7


def classifier(
    kind: str, auto: Any = AutoModelForSequenceClassification, **changes: Any
) -> Any:
    torch.manual_seed(0)
    options = {
        "num_labels": 3,
        "pad_token_id": PADDING,
        "classifier_dropout": 0.0,
    } | changes
    attention = "eager" if kind == "gpt_oss" else "sdpa"
    return auto.from_config(
        config(kind, **options), attn_implementation=attention
    ).float()


def batch(side: str, rows: int = 4, length: int = 23) -> dict[str, Tensor]:
    """Sequences of many lengths: one is a single token, one has no padding, one none but a pad in its middle."""
    ids = torch.randint(
        8, 97, (rows, length), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(ids)
    ids[1, 5] = PADDING
    for row, tokens in ((2, 1), (3, 13)):
        empty = slice(tokens, None) if side == "right" else slice(0, length - tokens)
        ids[row, empty], mask[row, empty] = PADDING, 0
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: whole(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def loss_of(logits: Tensor, rows: int) -> Tensor:
    return (
        logits.float().tanh()
        * torch.arange(logits[0].numel()).view(logits.shape[1:]).cos()
    ).sum() / rows


def on_ring(
    mesh: Any, kind: str, auto: Any, given: dict[str, Tensor], options: dict[str, Any]
) -> Any:
    model = rs.parallelize(classifier(kind, auto), mesh, **options)
    replica, replicas = mesh["replicate"].get_local_rank(), mesh["replicate"].size()
    rows = len(given["input_ids"])
    mine = {name: value.chunk(replicas)[replica] for name, value in given.items()}
    logits = model(
        **rs.shard_batch(mine, mesh, layout=options.get("layout", "zigzag"))
    ).logits
    loss_of(logits, rows).backward()
    return logits.detach(), gradients(model), list(whole_weights(model))


def alone(kind: str, auto: Any, given: dict[str, Tensor]) -> Any:
    model = classifier(kind, auto)
    logits = model(**given).logits
    loss_of(logits, len(logits)).backward()
    return logits.detach(), gradients(model)


@pytest.mark.parametrize(
    ("kind", "ranks", "replicas", "side", "options"),
    [
        ("llama", 2, 1, "right", {}),
        ("llama", 4, 2, "left", {}),
        *long(
            ("qwen3-window", 3, 1, "right", {"layout": "striped", "checkpoint": "none"})
        ),
        ("gpt2", 2, 1, "right", {"layout": "contiguous"}),
        *long(("gpt_oss", 2, 1, "right", {"layout": "balanced", "checkpoint": "full"})),
    ],
)
def test_sequence_logits_and_gradients_equal_one_process(
    pool, kind, ranks, replicas, side, options
):
    given = batch(side)
    logits, expected = alone(kind, AutoModelForSequenceClassification, given)
    for rank, (found, grads, names) in enumerate(
        pool.run(
            on_ring,
            ranks,
            kind,
            AutoModelForSequenceClassification,
            given,
            options,
            replicate=replicas,
        )
    ):
        assert relative(found, logits.chunk(replicas)[rank * replicas // ranks]) < 3e-6
        assert rank or "score.weight" in names
        close_by_name(grads, expected)


def test_logits_of_tokens_are_local(pool):
    given = {"input_ids": batch("right")["input_ids"]}
    logits, expected = alone("llama", AutoModelForTokenClassification, given)
    layout = rs.Layout("contiguous", length=23, ranks=2)
    results = pool.run(tokens_on_ring, 2, given)
    found = torch.cat([part for part, _ in results], 1)[:, : layout.length]
    assert relative(found, logits) < 3e-6
    close_by_name(results[0][1], expected)


def tokens_on_ring(mesh: Any, given: dict[str, Tensor]) -> Any:
    model = rs.parallelize(
        classifier("llama", AutoModelForTokenClassification), mesh, layout="contiguous"
    )
    logits = model(**rs.shard_batch(given, mesh, layout="contiguous")).logits
    weights = torch.arange(23 * 3).view(23, 3).cos()
    share = rs.shard(
        weights,
        rs.Layout("contiguous", length=23, ranks=2),
        mesh["ring"].get_local_rank(),
        0,
    )
    loss = (logits.tanh() * share).sum() / len(logits)
    rs.global_sum(loss, mesh).backward()
    return logits.detach(), gradients(model)


def refused(mesh: Any, what: str) -> str:
    with pytest.raises(rs.RingspanError) as caught:
        auto = (
            AutoModelForTokenClassification
            if what == "dropout"
            else AutoModelForSequenceClassification
        )
        changes = {
            "dropout": {"classifier_dropout": 0.1},
            "padding": {"pad_token_id": None},
        }.get(what, {})
        model = rs.parallelize(classifier("llama", auto, **changes), mesh)
        given = batch("right")
        if what == "labels":
            given["labels"] = torch.full_like(given["input_ids"], -100)
        if what == "empty row":
            given["attention_mask"][1] = 0
        if what == "logprobs":
            given["labels"] = torch.full_like(given["input_ids"], -100)
            rs.token_logprobs(model, rs.shard_batch(given, mesh))
        model(**rs.shard_batch(given, mesh))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "dropout",
            "LlamaForTokenClassification: dropout drops 0.1 of what its head is given",
        ),
        (
            "padding",
            "LlamaForSequenceClassification has no pad_token_id, which tells where each of 4 sequences ends",
        ),
        (
            "labels",
            "LlamaForSequenceClassification takes no labels on a ring; compute the loss of its logits",
        ),
        (
            "empty row",
            "row 1: its last token that is no pad_token_id (7) is padding by attention_mask; leave rows of",
        ),
        (
            "logprobs",
            "LlamaForSequenceClassification predicts no tokens; give token_logprobs a causal",
        ),
    ],
)
def test_what_a_classifier_does_not_do_raises(pool, what, message):
    for said in pool.run(refused, 2, what):
        assert message in said and "\n" not in said


def with_more(mesh: Any, what: str) -> str:
    model = classifier("llama")
    plain = type(model)

    class More(plain):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = (
                output.logits * 2 if what == "more" else output.logits.flip(0)
            )
            return output

    More.__name__ = plain.__name__
    model.__class__ = More
    with pytest.raises(rs.UnsupportedError) as caught:
        rs.parallelize(model, mesh)
    return str(caught.value)


@pytest.mark.parametrize("what", ["more", "other"])
def test_a_classifier_that_does_more_raises(pool, what):
    for said in pool.run(with_more, 2, what):
        assert (
            "has more between its decoder and its logits than its score and the last token"
            in said
        )
