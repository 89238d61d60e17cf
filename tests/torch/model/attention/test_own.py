"""Models with more than an output embedding behind their decoder, positions that they count themselves, or attention
in their own code: on a ring against one process in float64, by the trials of ``tests/every_model``.
"""

import logging
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    LlamaForCausalLM,
)

import ringspan as rs
from ringspan.core.geometry.layer_mask import CAUSAL
from ringspan.torch.model.layers.decoder import (
    cached_kinds,
    head_counts,
    layer_kinds,
)
from ringspan.torch.model.support import refuse_unsupported
from ringspan.torch.model.view import view_of
from tests.cases import long
from tests.every_model.run import BOUND, error_of, on_the_ring, one_process
from tests.every_model.tiny import tiny_config, tiny_model, tiny_tokens


@pytest.mark.parametrize(
    "kind",
    [
        *long(
            "roberta",  # a head of several layers; positions behind the rows for padding
        ),
        "bart",  # counts its positions itself
        "gpt_neo",  # attention in a method, with windows
        *long(
            "openai-gpt",  # with transposed keys, and layers that cannot be checkpointed
            "falcon",  # one key head for all
        ),
        "bloom",  # ALiBi
        *long(
            "kosmos-2.5:multimodal",  # a table that counts tokens itself, from the rows behind those for padding
            "granite_speech:multimodal",  # without the scale of logits that the config of its text has
            "rembert",  # inline
            "xglm",  # inline, with scaled queries
        ),
    ],
)
def test_packed_documents_on_three_ranks_equal_one_process(pool, kind):
    truth, alone = (
        one_process(kind, dtype, is_packed=True)
        for dtype in (torch.float64, torch.float32)
    )
    for outcome in pool.run(on_the_ring, 3, kind, "striped", True):
        assert error_of(outcome, truth) < max(BOUND, 2 * error_of(alone, truth))


def variant(kind: str, changes: dict[str, Any]) -> Any:
    config = tiny_config(kind).to_dict() | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**config), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                * 0.05
            )
    return model


def logits_of(
    mesh: Any, kind: str, changes: dict[str, Any], options: dict[str, Any] | None = None
) -> torch.Tensor:
    model = rs.parallelize(variant(kind, changes), mesh, **(options or {}))
    tokens = tiny_tokens(29)
    with torch.no_grad():
        local = model(**rs.shard_batch({"input_ids": tokens}, mesh)).logits
    return rs.unshard(local, rs.Layout("zigzag", 29, 2), mesh["ring"].get_group(), 1)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("falcon", {"alibi": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"multi_query": False}),
        ("mpt", {"n_heads": 6, "d_model": 48}),  # slopes of no power of two
        ("bloom", {"n_head": 6, "hidden_size": 48}),
        ("trocr", {"use_learned_position_embeddings": False}),
    ],
)
def test_variants_of_a_type_equal_one_process_or_raise(pool, kind, changes):
    outcomes = pool.outcomes(logits_of, 2, kind, changes)
    if kind == "trocr":  # its table of sines counts from the tokens themselves
        assert all("numbers its tokens itself" in str(outcome) for outcome in outcomes)
        return
    with torch.no_grad():
        expected = variant(kind, changes)(input_ids=tiny_tokens(29)).logits
    for outcome in outcomes:
        torch.testing.assert_close(outcome, expected, rtol=1e-5, atol=1e-5)


def test_positions_reach_decoders_whose_layers_are_in_segments(pool):
    with torch.no_grad():
        expected = variant("llama", {})(input_ids=tiny_tokens(29)).logits
    for outcome in pool.run(logits_of, 2, "llama", {}, {"layers_per_checkpoint": 2}):
        torch.testing.assert_close(outcome, expected, rtol=1e-5, atol=1e-5)


def loss_of(mesh: Any, mask: list[int] | None, padded: list[int]) -> float:
    """Of a RoBERTa on 11 tokens, of which some are its pad token."""
    model = tiny_model("roberta")
    tokens = tiny_tokens(11)
    tokens[:, padded] = model.config.pad_token_id
    batch = {"input_ids": tokens, "labels": tokens}
    if mask is not None:
        real = torch.tensor([mask])
        batch = {
            "input_ids": tokens,
            "attention_mask": real,
            "labels": tokens.masked_fill(real.roll(1) == 0, -100),
        }
    if mesh is None:
        return model(**batch).loss.item()
    return rs.parallelize(model, mesh)(**rs.shard_batch(batch, mesh)).loss.item()


@pytest.mark.parametrize("padded", [[3], [10], [4, 5, 9]])
def test_a_pad_token_in_a_text_whose_positions_skip_it_raises(pool, padded):
    for outcome in pool.outcomes(loss_of, 2, None, padded):
        assert isinstance(
            outcome, rs.UnsupportedError
        ) and "where no padding is marked" in str(outcome)


@pytest.mark.parametrize("mask", [[1] * 8 + [0] * 3, [0] * 3 + [1] * 8])
def test_marked_padding_moves_no_positions(pool, mask):
    padded = [place for place, real in enumerate(mask) if not real]
    expected = loss_of(None, mask, padded)
    assert pool.run(loss_of, 2, mask, padded) == pytest.approx([expected] * 2, rel=1e-5)


def refused(mesh: Any, kind: str, options: dict[str, Any]) -> None:
    rs.parallelize(tiny_model(kind), mesh, **options)


def generating(mesh: Any, kind: str) -> None:
    model: Any = rs.parallelize(tiny_model(kind), mesh, checkpoint="none")
    model.generate(tiny_tokens(5), max_new_tokens=2)


def test_what_is_not_supported_of_such_models_raises(pool):
    for outcome in pool.outcomes(refused, 2, "gpt_neo", {"compile": True}):
        assert isinstance(outcome, rs.UnsupportedError)
        assert "computes attention in its own code; use compile=False" in str(outcome)
    for kind, message in {
        "mpt": "its attention has ALiBi",
        "openai-gpt": "it keeps no cache",
    }.items():
        for outcome in pool.outcomes(generating, 2, kind):
            assert isinstance(outcome, rs.UnsupportedError)
            assert message in str(outcome)


@pytest.mark.parametrize("kind", ["bert", "rembert", "roberta"])
def test_a_model_whose_tokens_see_later_ones_is_refused(kind):
    with pytest.raises(
        rs.UnsupportedError, match=r"tokens see later ones .* set is_decoder=True"
    ):
        refuse_unsupported(view_of(variant(kind, {"is_decoder": False})))


def test_a_head_of_layers_that_cannot_be_tried_out_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("bert"))
    with pytest.raises(
        rs.UnsupportedError, match="cannot be tried out without weights"
    ):
        refuse_unsupported(view_of(model))


class Doubled(LlamaForCausalLM):
    """Its logits are twice what its head computes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = super().forward(*args, **kwargs)
        made.logits = 2 * made.logits
        return made


def test_logits_that_are_made_in_another_way_are_refused():
    config: Any = tiny_config("llama")
    with pytest.raises(
        rs.UnsupportedError,
        match="has more between its decoder and its logits than its head",
    ):
        refuse_unsupported(view_of(Doubled(config)))
    for kind, message in {
        "roformer": "computes attention in its own code, not through transformers' Atten",
        "blip-2:multimodal": r"makes its logits of more than its decoder's last .*pixel_values",
        "idefics:multimodal": r"needs more than tokens \(ValueError: Exactly 1 of pixel_values",
    }.items():
        with pytest.raises(rs.UnsupportedError, match=message):
            refuse_unsupported(view_of(tiny_model(kind)))
    muse: Any = tiny_model("muse_glimmer:multimodal")
    assert (
        refuse_unsupported(view_of(muse))
        and muse.config.text_config.output_multiplier != 1
    )


def test_the_head_of_a_model_is_found():
    assert refuse_unsupported(view_of(tiny_model("llama"))).parts == ()
    assert refuse_unsupported(view_of(tiny_model("bert"))).parts == ("cls",)
    assert refuse_unsupported(view_of(tiny_model("electra"))).parts == (
        "generator_predictions",
        "generator_lm_head",
    )
    assert [
        refuse_unsupported(view_of(tiny_model(kind))).shifts
        for kind in ("bert", "bart")
    ] == [True, False]


def warned(mesh: Any, kind: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ringspan.torch.model.support")
    logger.addHandler(handler)
    rs.parallelize(tiny_model(kind), mesh)
    logger.removeHandler(handler)
    return [line for line in lines if "labels" in line]


def test_shifted_labels_of_an_own_model_are_logged_by_one_rank(pool):
    first, second = pool.run(warned, 2, "bart")
    assert (
        len(first) == 1 and "on a ring labels are shifted" in first[0] and second == []
    )


def test_configs_with_their_own_names_for_heads_and_windows():
    falcon: Any = CONFIG_MAPPING["falcon"]
    assert head_counts(falcon(num_attention_heads=8, num_hidden_layers=1)) == [(8, 1)]
    grouped = falcon(
        num_attention_heads=8,
        num_kv_heads=4,
        new_decoder_architecture=True,
        num_hidden_layers=1,
    )
    assert head_counts(grouped) == [(8, 4)]
    assert [kind.window for kind in layer_kinds(tiny_config("gpt_neo"))] == [None, 8]


def test_a_decoder_beside_an_encoder_counts_its_own_layers():
    config = BartConfig(
        encoder_layers=3,
        decoder_layers=2,
        d_model=32,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        vocab_size=64,
        is_decoder=True,
    )
    config = BartForCausalLM(config).config
    assert head_counts(config) == [(4, 4)] * 2
    assert cached_kinds(config) == (CAUSAL,) * 2
