"""The page of models: what it says is what was measured, and what was measured keeps its bounds."""

import inspect
import json
import sys
from collections import Counter

import pytest
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from tests.cases import few
from tests.every_model import run
from tests.every_model.proofs import proven_config
from tests.every_model.refusals import refusal_of
from tests.every_model.run import (
    GENERATION,
    IMAGES,
    PAGE,
    PLAN,
    PROOF,
    RESULTS,
    TRIALS,
    WITH_IMAGES,
    is_exact,
)
from tests.every_model.tiny import (
    KINDS,
    MULTIMODAL,
    auto_class,
    tiny_config,
    usual_config,
)
from tests.every_model.weights import RESULTS as WEIGHTS

FACTS = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_results():
    assert run.page(FACTS) == PAGE.read_text(encoding="utf-8")


def test_the_readme_has_the_numbers_of_the_page():
    text = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    every = [row for row in FACTS["rows"] if "error" in row.get("sequence", {})]
    runs = [row for row in every if not row["kind"].endswith(MULTIMODAL)]
    generates = [row for row in runs if "error" in row[GENERATION]]
    assert f"{len(runs)} types" in text
    assert f"the text of {len(every) - len(runs)} more" in text
    assert f"{sum(IMAGES in row for row in every)} with [images" in text
    assert f"{len(generates)} model types" in text


def test_every_model_that_runs_is_exact_and_none_fails():
    outcomes = [
        row[trial]
        for row in FACTS["rows"]
        for trial in (*TRIALS, GENERATION, IMAGES)
        if trial in row
    ]
    assert sum("error" in outcome for outcome in outcomes) > 700
    assert all(is_exact(outcome) and "failed" not in outcome for outcome in outcomes)


# An encoder, and attention in the decoder's own code; no head of its own, and more than one token at a time before it.
TWO_REASONS = {"prophetnet", "blip:multimodal"}


def test_proofs_have_the_verdicts_of_the_other_trials():
    for row in FACTS["rows"]:
        proof, trial = row[PROOF], row.get("sequence", {})
        assert "failed" not in proof, row
        if "error" in trial or "exact" in proof:
            assert proof["exact"] and proof["error"] < 1e-9, row
        elif "refused" in trial and "refused" in proof:
            reasons = {refusal_of(each["refused"]) for each in (proof, trial)}
            assert len(reasons) == 1 or row["kind"] in TWO_REASONS, row


@pytest.mark.parametrize("kind", ["nemotron", "dots1", "qwen4_exp:multimodal"])
def test_a_type_is_proven_with_the_fields_it_lacks(kind):
    usual, given = usual_config(kind).to_dict(), proven_config(kind).to_dict()
    changed = {name for name in usual if given[name] != usual[name]}
    lacking = {name for name in changed if usual[name] is None}
    assert lacking or "text_config" in changed


@pytest.mark.parametrize(
    "row",
    few([row for row in FACTS["rows"] if PLAN in row], 9),
    ids=lambda row: row["kind"],
)
def test_the_planner_reads_a_type_or_says_why_not(row):
    assert run.read_by_planner(row["kind"]) == row[PLAN] and "failed" not in row[PLAN]


def test_every_type_is_listed_and_those_with_images_were_tried():
    assert [row["kind"] for row in FACTS["rows"]] == sorted(KINDS)
    rows = [row for row in FACTS["rows"] if row["kind"].endswith(MULTIMODAL)]
    seen, refused = (
        {
            row["kind"].removesuffix(MULTIMODAL)
            for row in rows
            if found in row.get(trial, {})
        }
        for trial, found in ((IMAGES, "error"), ("sequence", "refused"))
    )
    known = {kind.partition("-")[0] for kind in WITH_IMAGES}
    # A release of transformers may break a class by itself.
    assert seen == known - refused
    assert len(known & refused) <= 1


def test_each_refusal_is_in_words_for_who_reads_the_page():
    for row in FACTS["rows"]:
        if "refused" in row.get("sequence", {}):
            assert refusal_of(row["sequence"]["refused"]).why


def test_a_tiny_config_has_two_layers_of_each_kind():
    # whose towers know others
    for row in FACTS["rows"]:
        if "error" not in row.get("sequence", {}) or row["kind"].endswith(MULTIMODAL):
            continue
        whole = tiny_config(row["kind"])
        config = whole.get_text_config(decoder=True)
        # which a hybrid layer has both of
        counts = Counter(
            (
                *(getattr(config, "layer_types", None) or ()),
                *(getattr(config, "mlp_layer_types", None) or ()),
            )
        )
        for kind in (
            "full_attention",
            "linear_attention",
        ):
            counts[kind] += counts["hybrid"]
        # which the config of dots3 makes of it
        counts["full_attention"] += counts["indexed_attention"]
        model = auto_class(row["kind"])._model_mapping[type(whole)]
        source = inspect.getsource(sys.modules[model.__module__])
        for kind in ALLOWED_LAYER_TYPES:
            assert f'"{kind}"' not in source or counts[kind] >= 2, (
                f"{row['kind']} has {counts[kind]} of {kind}"
            )
        assert config.num_hidden_layers >= 2


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", "gemma4_text", "deepseek_v3", "glm46v:multimodal"]
)
def test_a_tiny_config_has_the_sizes_of_its_kind(kind):
    text = tiny_config(kind).get_text_config()
    assert text.vocab_size == 97 and text.hidden_size == 64


FOUND = json.loads(WEIGHTS.read_text(encoding="utf-8"))


def test_the_weights_of_every_type_go_there_and_back():
    others = {kind: outcome for kind, outcome in FOUND.items() if "same" not in outcome}
    # Transformers cannot open what it writes of these: their config is no longer that of a causal language model.
    assert others.keys() == {"emu3", "mllama"}, others
    assert all(
        outcome["refused"].startswith("not by transformers either")
        for outcome in others.values()
    )
    assert len(FOUND) > 90 and all(
        len(outcome.get("same", "..")) >= 2 for outcome in FOUND.values()
    )
