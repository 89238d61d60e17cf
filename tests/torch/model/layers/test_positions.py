"""More tokens than a model was made for: said once and saved, or refused where its table of positions ends."""

import pytest
import torch
from transformers import AutoConfig

from ringspan.core.errors import UnsupportedError
from ringspan.torch.model.layers.decoder import text_config
from ringspan.torch.model.layers.positions import (
    as_trained,
    note_length,
    num_learned_positions,
    rotates,
)
from ringspan.torch.parallelize import parallelize
from ringspan.torch.shard_batch import shard_batch
from tests.cases import long
from tests.every_model.tiny import CAUSAL, tiny_model, tiny_tokens
from tests.torch import models

LENGTH = 21  # no multiple of what any ring here needs: there is padding
BERT = {
    "is_decoder": True,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
TABLES = {
    "gpt2": {},
    "gpt_bigcode": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bert-generation": BERT,
}


def table(kind, positions):
    """A model with learned positions for so many tokens."""
    if kind == "bert-generation":
        from transformers import BertGenerationConfig, BertGenerationDecoder

        torch.manual_seed(0)
        sizes = {
            name: models._SIZES[name]
            for name in ("vocab_size", "hidden_size", "intermediate_size")
        }
        config = BertGenerationConfig(
            **sizes,
            **BERT,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=positions,
        )
        return BertGenerationDecoder(config).float()
    return models.build(kind, **TABLES[kind], max_position_embeddings=positions)


def loss_of(mesh, kind, positions, length, layout, packed):
    model = parallelize(table(kind, positions), mesh, layout=layout, checkpoint="none")
    tokens = models.tokens(2, length)
    batch = {"input_ids": tokens, "labels": tokens}
    if packed:
        batch["position_ids"] = torch.cat((torch.arange(length - 4), torch.arange(4)))
    loss = model(**shard_batch(batch, mesh, layout=layout)).loss
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(3, "striped"), *long((1, "zigzag"), (2, "zigzag"), (4, "contiguous"))],
)
def test_padding_needs_no_position_of_a_learned_table(pool, kind, ranks, layout):
    tokens = models.tokens(2, LENGTH)
    expected = table(kind, LENGTH)(input_ids=tokens, labels=tokens).loss.item()
    for loss in pool.run(loss_of, ranks, kind, LENGTH, LENGTH, layout, False):
        assert loss == pytest.approx(expected, rel=1e-6)


def padded_left(mesh, kind):
    tokens, mask = models.tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :6] = 0
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask.cumsum(1) < 2, -100),
    }
    model = table(kind, LENGTH)
    return (
        model(**batch)
        if mesh is None
        else parallelize(model, mesh)(**shard_batch(batch, mesh))
    ).loss.item()


@pytest.mark.parametrize("kind", TABLES)
def test_positions_after_left_padding_equal_transformers(pool, kind):
    """Counted with the padding, but for OPT's."""
    assert pool.run(padded_left, 2, kind) == pytest.approx(
        [padded_left(None, kind)] * 2, rel=1e-6
    )


def test_packed_documents_need_as_many_positions_as_the_longest(pool):
    assert all(
        loss > 0
        for loss in pool.run(loss_of, 3, "gpt2", LENGTH - 4, LENGTH, "zigzag", True)
    )


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_sequence_beyond_the_table_is_refused_on_every_rank(pool, kind):
    for outcome in pool.outcomes(loss_of, 2, kind, LENGTH, LENGTH + 1, "zigzag", False):
        assert isinstance(outcome, UnsupportedError), outcome
        assert (
            f"learned positions for {LENGTH} tokens, the sequence has {LENGTH + 1}"
            in str(outcome)
        )
    # nobody was left waiting
    pool.run(loss_of, 2, kind, LENGTH, LENGTH, "zigzag", False)


def one_replica_too_long(mesh):
    """Documents of a length that only one replica's table has not, in sequences that are alike."""
    model = parallelize(table("gpt2", 12), mesh)
    first = 8 if mesh["replicate"].get_local_rank() == 0 else 14
    positions = torch.cat((torch.arange(first), torch.arange(16 - first)))
    batch = {
        "input_ids": models.tokens(1, 16),
        "labels": models.tokens(1, 16),
        "position_ids": positions,
    }
    return float(model(**shard_batch(batch, mesh)).loss)


def test_replicas_refuse_together(pool):
    outcomes = pool.outcomes(one_replica_too_long, 4, replicate=2)
    assert all(
        isinstance(outcome, UnsupportedError) and "positions" in str(outcome)
        for outcome in outcomes
    ), outcomes


def test_which_tables_are_found():
    assert [num_learned_positions(table(kind, 40)) for kind in TABLES] == [40] * 4
    assert num_learned_positions(models.build("llama")) is None


def trained_length(mesh, folder, changes):
    """What is said in steps of several lengths, and the length that the saved model has."""
    with models.logged() as lines:
        model = parallelize(
            models.build("llama", max_position_embeddings=16, **changes), mesh
        )
        for length in (10, 20, 30):
            tokens = models.tokens(1, length)
            model(
                **shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
            ).loss.backward()
        model.eval()
        with torch.no_grad():
            model(**shard_batch({"input_ids": models.tokens(1, 40)}, mesh))
        model.save_pretrained(folder)
    return [line for line in lines if "positions" in line], AutoConfig.from_pretrained(
        folder
    )


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


@pytest.mark.parametrize(
    ("changes", "says", "saved"),
    [
        ({}, True, 30),
        (rope("linear", factor=2.0), True, 30),
        (rope("dynamic", factor=2.0), False, 16),
        (rope("dynamic", factor=1.5), True, 16),
    ],
    ids=["default", "linear", "dynamic to 32", "dynamic to 24"],
)
def test_longer_than_the_model_allows_is_logged_once_and_saved(
    pool, tmp_path, changes, says, saved
):
    (first, config), (second, _) = pool.run(trained_length, 2, tmp_path, changes)
    assert config.max_position_embeddings == saved
    assert second == [] and len(first) == says
    if says:
        assert "longer than the 16 positions" in first[0] and "model.rope" in first[0]


def test_a_length_that_frequencies_derive_from_is_left_alone():
    model = torch.nn.Module()
    model.config = models.config("llama", max_position_embeddings=16)
    model.config.rope_parameters = {
        "full_attention": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 8,
        }
    }
    note_length(model, 32, says=False)
    with as_trained(model):
        assert model.config.max_position_embeddings == 16


PLACED = "beam", "gpt2", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3"


@pytest.mark.parametrize(
    "kind",
    [kind for kind in (*PLACED, "gpt_oss", "granite", "nanochat") if kind in CAUSAL],
)
def test_positions_rotate_where_only_distances_matter(kind):
    model = tiny_model(kind).eval()
    ids, positions = tiny_tokens(24), torch.arange(24)[None]
    here, there = (
        model(input_ids=ids, position_ids=each, use_cache=False).logits
        for each in (positions, positions + 5)
    )
    assert (
        rotates(text_config(model.config))
        == (models.relative(there, here) < 1e-5)
        == (kind not in PLACED)
    )
