"""Every language model of transformers, tiny, on the ring against itself on one process: ``make models``.

Writes ``benchmarks/results/models.json`` and of it docs/models.md. Model types as arguments do only those again:
``llama``, or ``llava:multimodal`` of the models that see or hear; ``multimodal`` does all of these, ``plan`` what the
planner reads alone, ``proof`` the proofs that are missing. Rows are written as they come, and an interrupted run is
resumed by the next.
"""

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import ringspan as rs
from ringspan.measure.machine import describe_machine
from ringspan.plan.model.configs import from_config
from ringspan.proof.float64 import in_float64_of
from ringspan.torch.model.layers.decoder import STATEFUL_LAYERS, text_config
from ringspan.torch.model.layers.family import family_of
from ringspan.torch.model.support import refuse_config, refuse_unsupported
from ringspan.torch.model.view import view_of
from ringspan.torch.runtime.forks import serve_forks
from tests.every_model.proofs import judge_proof
from tests.every_model.refusals import refusal_of
from tests.every_model.tiny import (
    KINDS,
    MULTIMODAL,
    auto_class,
    tiny_config,
    tiny_model,
    tiny_tokens,
    undropped_config,
)
from tests.pool import Pool
from tests.torch.mechanisms.media.models import KINDS as WITH_IMAGES
from tests.torch.mechanisms.media.models import batch_of
from tests.torch.mechanisms.media.models import one_process as image_step_of_one
from tests.torch.mechanisms.media.test_training import ring_step as image_step
from tests.torch.models import relative, whole_gradients
from tests.torch.test_parallelize import restarting

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results" / "models.json"
PAGE: Final = ROOT / "docs" / "models.md"
LENGTH: Final = 37
DOCUMENTS: Final = (17, 20)
# What is tried: ranks, layout, whether the sequence is two documents, ranks that share the heads. Layers with a state
# need consecutive tokens: contiguous in place of striped.
TRIALS: Final = {
    "sequence": (2, "zigzag", False, 1),
    "documents": (3, "striped", True, 1),
    "tp": (4, "zigzag", False, 2),
}
# What is generated: tokens of a prompt that is read in chunks, so many of each rank, and of what follows, on two ranks.
# Two chunks are long enough to be split over the ring (SPLIT_FROM_TOKENS); each rank computes all of the last one.
PROMPT, READ_AT_ONCE, WRITTEN, RANKS = 75, 17, 12, 2
GENERATION: Final = "generation"
TIMEOUT_SECONDS: Final = 600
"""Seconds that ranks may take for a trial, on a machine that has much else to do."""
IMAGES: Final = "images"
PLAN: Final = "plan"
PROOF: Final = "proof"
UNFINISHED: Final = RESULTS.with_name("models-unfinished.json")
# models that make a number of the default dtype of one of their own
IN_DEFAULT_DTYPE: Final = ("xglm",)
# whose tables or experts know no float64
IN_FLOAT32: Final = (
    "llama4",
    "qwen3_vl_moe",
    "qwen3_5_moe",
)
# on rings too: gradients as small as the rounding of float32, and an index that chooses by it
IN_FLOAT64: Final = ("qwen3_5", "qwen4_exp")
LOSS_BOUND, BOUND = 1e-6, 1e-5  # relative, as in tests/torch/test_parallelize.py


def one_process(kind: str, dtype: torch.dtype, *, is_packed: bool) -> dict[str, Any]:
    """Loss, logits and gradients of the plain model; each document alone."""
    model, tokens = tiny_model(kind), tiny_tokens(LENGTH)
    if kind in IN_DEFAULT_DTYPE:
        torch.set_default_dtype(dtype)
    try:
        return _one_process(model, tokens, dtype, is_packed=is_packed)
    finally:
        torch.set_default_dtype(torch.float32)


def _one_process(
    model: Any, tokens: torch.Tensor, dtype: torch.dtype, *, is_packed: bool
) -> dict[str, Any]:
    if dtype == torch.float64:
        model = widened(model)
    parts = tokens.split(DOCUMENTS, 1) if is_packed else (tokens,)
    logits = torch.cat(
        [model(**read(model, part), use_cache=False).logits for part in parts], 1
    )
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), "gradients": gradients}


def has_index(config: Any) -> bool:
    """Return True if layers of a text's config choose their keys by an index."""
    return family_of(config).has_own_layers(config)


def widened(model: Any) -> Any:
    is_wide = has_states(model.config) or has_index(text_config(model.config))
    model = in_float64_of(model) if is_wide else model.to(torch.float64)
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def read(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    if model.config.model_type != "paligemma":
        return {"input_ids": tokens}
    # none of it is a prompt
    return {
        "input_ids": tokens,
        "token_type_ids": torch.ones_like(tokens),
    }


def on_the_ring(
    mesh: DeviceMesh, kind: str, layout: str, is_packed: bool
) -> dict[str, Any]:
    model, tokens = tiny_model(kind), tiny_tokens(LENGTH)
    if kind.removesuffix(MULTIMODAL) in IN_FLOAT64:
        model = widened(model)
    checkpoint = "attention" if model.supports_gradient_checkpointing else "none"
    model = rs.parallelize(model, mesh, layout=layout, checkpoint=checkpoint)
    batch = read(model, tokens) | {"labels": tokens}
    if is_packed:
        batch["position_ids"] = restarting([list(DOCUMENTS)])
    local = rs.shard_batch(batch, mesh, layout=layout)
    loss = model(**local).loss
    loss.backward()
    gradients = whole_gradients(model)
    del local["shift_labels"]
    with torch.no_grad():
        split = rs.Layout(layout, LENGTH, mesh["ring"].size())
        logits = rs.unshard(model(**local).logits, split, mesh["ring"].get_group(), 1)
    return {"loss": loss.detach(), "logits": logits, "gradients": gradients}


def written(model: Any) -> dict[str, Any]:
    """The most likely tokens after a prompt, and the logits of each."""
    with torch.no_grad():
        out = model.eval().generate(
            # the first argument of models that hear is a sound
            input_ids=tiny_tokens(PROMPT),
            max_new_tokens=WRITTEN,
            min_new_tokens=WRITTEN,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return {"tokens": out.sequences, "logits": torch.stack(out.logits)}


def written_on_the_ring(mesh: DeviceMesh, kind: str) -> dict[str, Any]:
    model = tiny_model(kind)
    model = rs.parallelize(
        model,
        mesh,
        checkpoint="attention" if model.supports_gradient_checkpointing else "none",
    )
    model.ring_prefill_tokens = READ_AT_ONCE
    return written(model)


def judge_generation(pool: Pool, kind: str) -> dict[str, Any]:
    """The error of the logits while a model type writes on a ring, if all tokens are those of one process."""
    try:
        model = tiny_model(kind)
        # Of equal scores of an index, which are many, transformers in float32 takes others.
        plain = written(
            widened(model) if has_index(text_config(model.config)) else model
        )
    except (
        Exception
    ) as error:  # whatever it raises: it does not generate in transformers either
        return {"refused": f"not on one process either: {said(error)}"}
    outcomes = pool.outcomes(written_on_the_ring, RANKS, kind)
    if failure := _failure(pool, outcomes):
        return failure
    if not all(torch.equal(outcome["tokens"], plain["tokens"]) for outcome in outcomes):
        return {"failed": "other tokens than those of one process"}
    return {
        "error": max(
            relative(outcome["logits"], plain["logits"]) for outcome in outcomes
        ),
        "alone": 0.0,
    }


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:150]


def _failure(pool: Pool, outcomes: list[Any]) -> dict[str, Any] | None:
    """Why ranks have no result, if they have none."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failures:
        return None
    if not all(isinstance(failure, rs.RingspanError) for failure in failures):
        pool.restart()
    refused = len(failures) == len(outcomes) and isinstance(
        failures[0], rs.RingspanError
    )
    return {"refused" if refused else "failed": str(failures[0])}


def has_states(config: Any) -> bool:
    """Whether a model has layers that carry a state over tokens, or convolve them."""
    return bool(
        STATEFUL_LAYERS & set(getattr(text_config(config), "layer_types", None) or ())
    )


def judge(pool: Pool, kind: str) -> dict[str, Any]:
    """What each trial of a model type gave, and its proof: its worst error, or why there is none."""
    return judge_trials(pool, kind) | {PROOF: judge_proof(pool, kind)}


def judge_trials(pool: Pool, kind: str) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": kind}
    alone: dict[
        bool, list[dict[str, Any]]
    ] = {}  # in float64 and in float32, by whether documents are apart
    for trial, (ranks, layout, is_packed, tp) in TRIALS.items():
        try:
            if layout == "striped" and has_states(tiny_config(kind)):
                layout = "contiguous"
            if is_packed not in alone:
                dtypes = torch.float64, torch.float32
                alone[is_packed] = [
                    one_process(kind, dtype, is_packed=is_packed) for dtype in dtypes
                ]
            truth, plain = alone[is_packed]
        except Exception as error:  # whatever it raises: no tiny one can be had of it by what is known here
            if refusal := refusal_without_trial(kind):
                return row | {"sequence": {"refused": refusal}}
            return row | {"untried": said(error)}
        outcomes = pool.outcomes(on_the_ring, ranks, kind, layout, is_packed, tp=tp)
        row[trial] = _failure(pool, outcomes) or {
            "error": max(error_of(each, truth) for each in outcomes),
            "alone": error_of(plain, truth),
        }
        if "refused" in row[trial] and trial == "sequence":
            return row
    row |= {GENERATION: judge_generation(pool, kind), PLAN: read_by_planner(kind)}
    if kind.endswith(MULTIMODAL) and kind.removesuffix(MULTIMODAL) in WITH_IMAGES:
        row[IMAGES] = judge_images(pool, kind.removesuffix(MULTIMODAL))
    return row


def judge_images(pool: Pool, kind: str) -> dict[str, Any]:
    """The error of a step with two images, or sounds, on a ring."""
    examples, dtype = (
        [[3, "i", 2, "i", 5]],
        torch.float64 if kind in IN_FLOAT64 else torch.float32,
    )
    batch = batch_of(kind, examples, dtype=dtype)
    dtypes = torch.float32 if kind in IN_FLOAT32 else torch.float64, torch.float32
    truth, plain = (
        image_step_of_one(
            kind,
            {k: x.to(each) if x.is_floating_point() else x for k, x in batch.items()},
            each,
        )
        for each in dtypes
    )
    outcomes = pool.outcomes(
        image_step, RANKS, kind, [examples], "zigzag", {"dtype": dtype}
    )
    return _failure(pool, outcomes) or {
        "error": max(error_of(each, truth) for each in outcomes),
        "alone": error_of(plain, truth),
    }


def read_by_planner(kind: str) -> dict[str, Any]:
    """Whether the planner counts the parameters of a type's model, of which it is given the config; or why not."""
    config, model_type = tiny_config(kind), kind.removesuffix(MULTIMODAL)
    # of those that see the planner counts the towers too, unless the text alone is loaded
    with torch.device("meta"):
        autos = {
            auto_class(each)
            for each in KINDS
            if each in (model_type, model_type + MULTIMODAL)
        }
        counts = [auto.from_config(config).num_parameters() for auto in autos]
    try:
        shape = from_config(
            json.loads(config.to_json_string(use_diff=False)), model_type
        )
    except rs.RingspanError as error:
        return {"refused": str(error)}
    return (
        {"read": True}
        if shape.parameters in counts
        else {"failed": f"{shape.parameters} parameters of {counts}"}
    )


def refusal_without_trial(kind: str) -> str:
    """Why a model type raises, by its usual config or a tiny model that does not run; empty when neither says so."""
    try:
        refuse_config(undropped_config(kind))
        refuse_unsupported(view_of(tiny_model(kind)))
    except rs.UnsupportedError as error:
        return str(error)
    except Exception:  # whatever it raises of which no tiny one can be made
        return ""
    return ""


def is_exact(outcome: dict[str, Any]) -> bool:
    """Within the bound, or as far from float64 as one process is, where that is further; a proof has its verdict."""
    if "exact" in outcome:
        return outcome["exact"]
    return "error" not in outcome or outcome["error"] < max(BOUND, 2 * outcome["alone"])


def error_of(outcome: dict[str, Any], truth: dict[str, Any]) -> float:
    """The worst relative error, the loss's as it compares with its own, narrower bound."""
    errors = [relative(outcome["loss"], truth["loss"]) * BOUND / LOSS_BOUND]
    errors.append(relative(outcome["logits"], truth["logits"]))
    # A gradient that is nothing but rounding, such as that of a bias on keys, is measured against the largest one.
    floor = 1e-3 * max(
        float(g.norm()) for g in truth["gradients"].values() if g is not None
    )
    none = torch.zeros(())
    for name, gradient in truth["gradients"].items():
        found, expected = (
            none if g is None else g.double()
            for g in (outcome["gradients"][name], gradient)
        )
        errors.append(
            float((found - expected).norm()) / max(float(expected.norm()), floor)
        )
    return max(errors)


def page(facts: dict[str, Any]) -> str:
    rows = facts["rows"]
    ran = [row for row in rows if "error" in row.get("sequence", {})]
    refused = [row for row in rows if "refused" in row.get("sequence", {})]
    untried = [row for row in rows if "untried" in row]
    texts, seeing = (
        [row for row in ran if row["kind"].endswith(MULTIMODAL) == sees]
        for sees in (False, True)
    )
    all_seeing = [row for row in rows if row["kind"].endswith(MULTIMODAL)]
    lines = [
        "# Models",
        "",
        f"transformers {facts['transformers']} knows {len(rows) - len(all_seeing)} types of causal language models and",
        f"{len(all_seeing)} of models that see or hear. Of the former {len(texts)}, and of the latter {len(seeing)},",
        f"run on the ring as they are; {len(refused)} raise an error that says why; of {len(untried)} no tiny one was",
        "made here. `make models` tries all of them and writes this page; numbers and messages are in",
        "[benchmarks/results/models.json](../benchmarks/results/models.json).",
        "",
        "## What runs",
        "",
        "Each with a tiny config of random weights and at least two layers of each kind that the type can have (of",
        "attention, of feed-forward), in float32, against itself on one process in float64: the worst",
        "relative error of the loss (times ten: its bound is 1e-6), the logits and every gradient (bound 1e-5).",
        "Sequence: two ranks, zigzag, and the error of one process in float32. Documents: two in one sequence on",
        "three ranks, striped (contiguous where layers carry a state), each against itself alone. qwen3_5 is in",
        "float64 on the rings too, since the gradients of its decays are as small as float32's rounding. Heads split:",
        "two ranks of a ring times two that share the heads ([tensor parallelism](tensor-parallel.md)).",
        f"Generation: the {WRITTEN} most likely tokens after a prompt of {PROMPT}, read by two ranks in chunks of",
        f"{READ_AT_ONCE} each: all are those of one process in float32, and this is the relative error of their logits",
        "against its own (bound 1e-5). Proof: the worst relative error that [`ringspan prove`](prove.md) finds for the",
        "type's usual config on two ranks in float64 (bound 1e-9): losses, gradients, weights after two steps, logits",
        f"and generation, with padding and documents; {sum(PROOF in row for row in ran)} types have one.",
        "Plan: `ringspan plan` reads the type's config, and counts the parameters of its",
        f"model ([planning](planning.md)); {sum('read' in row[PLAN] for row in ran)} types of both tables are read. "
        "Not these:",
        "",
        *(f"- {row[PLAN]['refused']}" for row in ran if "refused" in row[PLAN]),
        "",
        *_table(texts, (*TRIALS, GENERATION, PROOF, PLAN)),
        "",
        'Types without activation checkpointing in transformers (ctrl, jetmoe, GPT-1) need `checkpoint="none"`.',
        "",
        "BART, its relatives, TrOCR and Whisper compare labels with the logits of the same token in their own loss.",
        "On a ring labels are shifted as those of all models, and `parallelize` says so. RoBERTa and its relatives",
        "number tokens after the rows of their table that are for padding; transformers' `generate` does not, and on",
        "a ring it does not either.",
        "",
        "Mixtures of experts that have a load-balancing loss (`output_router_logits=True`, in the call or the config)",
        "get it over the tokens of all ranks, as on one process.",
        "",
        "## Models that see or hear",
        "",
        "The models of `AutoModelForMultimodalLM` (those of `AutoModelForImageTextToText`, and models that hear), and",
        "of `AutoModelForSeq2SeqLM` those with a decoder alone: the same trials with text alone, and the",
        "kinds of layers that the text of the usual config has. Images: a step with",
        "two images, or sounds, on two ranks against one process, in float64 where the type knows that",
        "(bound 1e-5); see [multimodal.md](multimodal.md). Where there is no number the decoder goes on the ring and",
        "trains on text, and images or sounds in a batch raise.",
        "",
        *_table(seeing, (*TRIALS, GENERATION, IMAGES, PROOF, PLAN)),
        "",
        "## What raises an error",
        "",
        "Of a type that can have layers which a ring does not compute, a model without such layers runs. Those with an",
        "encoder are no causal language models by themselves, nor is gemma4_unified_assistant, which drafts for",
        "another model.",
        "",
        "| why | what it would take | causal language models | models that see or hear |",
        "| --- | --- | --- | --- |",
    ]
    reasons = sorted(
        (refusal_of(row["sequence"]["refused"]), row["kind"]) for row in refused
    )
    for (why, needed), group in groupby(reasons, key=lambda pair: pair[0]):
        kinds = [kind for _, kind in group]
        names = (
            ", ".join(
                _name(kind) for kind in kinds if kind.endswith(MULTIMODAL) == sees
            )
            for sees in (False, True)
        )
        lines.append(f"| {why} | {needed} | {' | '.join(names)} |")
    lines += [
        "",
        "## What was not tried",
        "",
        "No tiny config was made of these. A proof makes the language model without a tower that cannot be made:",
        "",
        "| model type | class | why | proof |",
        "| --- | --- | --- | --- |",
        *(
            f"| {_name(row['kind'])} | {auto_class(row['kind']).__name__} | {row['untried']} | {_cell(row[PROOF])} |"
            for row in untried
        ),
        "",
    ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], trials: tuple[str, ...]) -> list[str]:
    """Of each model type what one process is off, and each trial."""
    titles = (
        "model type",
        "one process",
        *({"tp": "heads split"}.get(trial, trial) for trial in trials),
    )
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for row in rows:
        cells = (
            f"{row['sequence']['alone']:.0e}",
            *(_cell(row[trial]) if trial in row else "" for trial in trials),
        )
        lines.append(f"| {_name(row['kind'])} | {' | '.join(cells)} |")
    return lines


def _name(kind: str) -> str:
    return kind.removesuffix(MULTIMODAL)


def _cell(outcome: dict[str, Any]) -> str:
    if "read" in outcome:
        return "yes"
    if "untried" in outcome:
        return "not tried"
    return (
        f"{outcome['error']:.0e}"
        if "error" in outcome
        else "refused"
        if "refused" in outcome
        else "fails"
    )


def main(kinds: list[str]) -> int:
    """Try the kinds, or all; 1 when one that runs is not exact or fails without a word."""
    serve_forks("ringspan.train.loop", "transformers.models.llama.modeling_llama")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    path = RESULTS if kinds else UNFINISHED
    rows, pool, bad = _rows(path), Pool(timeout_seconds=TIMEOUT_SECONDS), list[str]()
    for kind in KINDS:
        row = _tried(pool, kind, kinds, rows.get(kind))
        if row is None:
            continue
        rows[kind] = row
        outcomes = [
            row[trial]
            for trial in (*TRIALS, GENERATION, IMAGES, PLAN, PROOF)
            if trial in row
        ]
        if any("failed" in outcome or not is_exact(outcome) for outcome in outcomes):
            bad.append(kind)
        print(json.dumps(row), flush=True)
        _write(path, rows)
    pool.close()
    facts = _write(RESULTS, rows)
    PAGE.write_text(page(facts), encoding="utf-8")
    UNFINISHED.unlink(missing_ok=True)
    print(f"not as they should be: {', '.join(bad) or 'none'}")
    return int(bool(bad))


def _tried(
    pool: Pool, kind: str, kinds: list[str], before: dict[str, Any] | None
) -> dict[str, Any] | None:
    """A type's new row, or None if nothing of it is asked for."""
    if kinds == [PLAN]:
        is_read = before is not None and "error" in before.get("sequence", {})
        return before | {PLAN: read_by_planner(kind)} if is_read else None  # pyright: ignore[reportOptionalOperand]
    if kinds == [PROOF]:
        is_new = before is not None and PROOF not in before
        return before | {PROOF: judge_proof(pool, kind)} if is_new else None  # pyright: ignore[reportOptionalOperand]
    is_asked = {kind, *kind.split(":")} & {*kinds} if kinds else before is None
    return judge(pool, kind) if is_asked else None


def _rows(path: Path) -> dict[str, Any]:
    """The rows of a file by their types; none if there is no such file."""
    if not path.is_file():
        return {}
    return {row["kind"]: row for row in json.loads(path.read_text())["rows"]}


def _write(path: Path, rows: dict[str, Any]) -> dict[str, Any]:
    facts = {
        "command": "make models",
        "transformers": transformers.__version__,
        "machine": describe_machine(),
        "rows": [rows[kind] for kind in sorted(rows)],
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


if __name__ == "__main__":
    # By its full name, by which the ranks import what they run.
    from tests.every_model import run

    sys.exit(run.main(sys.argv[1:]))
