"""``RingLM`` gives item by item what lm-eval's own model of transformers gives on one process."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer

import ringspan as rs
from ringspan.core.errors import ConfigError, UnsupportedError
from ringspan.evaluate import RingLM
from tests.evaluate.harness.data import TASKS, write
from tests.evaluate.models import save


def parts(folder: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def samples(results: dict[str, Any]) -> dict[str, list[Any]]:
    """What the model answered to each request, by task."""
    found = {}
    for name in TASKS:
        rows = sorted(results["samples"][name], key=lambda row: row["doc_id"])
        found[name] = [row["resps"] for row in rows]
    return found


def evaluated(lm: Any, folder: str) -> dict[str, Any]:
    from ringspan.evaluate.harness.run import known_tasks, run_tasks

    found = run_tasks(lm, TASKS, known_tasks(folder, TASKS))
    assert found is not None
    return found


def on_ring(mesh: DeviceMesh, model_folder: Path, folder: str) -> Any:
    model, tokenizer = parts(model_folder)
    lm = RingLM(rs.parallelize(model, mesh), tokenizer)
    type(lm.model).ring_prefill_tokens = 11
    found = evaluated(lm, folder)
    return samples(found), {name: found["results"][name] for name in TASKS}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, pool):
    """With the pool, so that the worker that has it asks once for all tests."""
    from lm_eval.models.huggingface import HFLM

    folder = save(
        tmp_path_factory.mktemp("harness") / "model", max_position_embeddings=256
    )
    tasks = write(tmp_path_factory.mktemp("tasks"))
    model, tokenizer = parts(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = (
        tokenizer.eos_token_id
    )
    plain: Any = HFLM  # its decorator hides its parameters
    found = evaluated(
        plain(pretrained=model, tokenizer=tokenizer, batch_size=1), str(tasks)
    )
    return (
        folder,
        tasks,
        samples(found),
        {name: found["results"][name] for name in TASKS},
    )


def flat(value: Any) -> list[Any]:
    return (
        [each for part in value for each in flat(part)]
        if isinstance(value, (list, tuple))
        else [value]
    )


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_it_answers_as_lm_evals_own_model(pool, expected, ranks):
    folder, tasks, wanted, scores = expected
    for found, found_scores in pool.run(on_ring, ranks, folder, str(tasks)):
        for name in TASKS:
            one, other = flat(found[name]), flat(wanted[name])
            assert len(one) == len(other) > 3
            for mine, theirs in zip(one, other, strict=True):
                assert mine == (
                    pytest.approx(theirs, rel=1e-5)
                    if isinstance(theirs, float)
                    else theirs
                ), name
            assert found_scores[name].keys() == scores[name].keys()
            for key, value in scores[name].items():
                assert found_scores[name][key] == (
                    pytest.approx(value, rel=1e-5)
                    if isinstance(value, float)
                    else value
                )


def asked(lm: Any, method: str, *every: tuple[Any, ...]) -> list[Any]:
    """What a model answers to some requests of a kind."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=deepcopy(each), idx=0)
        for each in every
    ]
    return getattr(lm, method)(requests, disable_tqdm=True)


def own_model(folder: Path, **options: Any) -> Any:
    """lm-eval's own model of transformers on one process."""
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = parts(folder)
    plain: Any = HFLM  # its decorator hides its parameters
    return plain(pretrained=model, tokenizer=tokenizer, batch_size=1, **options)


def ring_answers(
    mesh: DeviceMesh,
    folder: Path,
    method: str,
    every: list[tuple[Any, ...]],
    **options: Any,
) -> Any:
    model, tokenizer = parts(folder)
    return asked(
        RingLM(rs.parallelize(model, mesh), tokenizer, **options), method, *every
    )


def test_generation_settings_mean_the_same_as_in_lm_eval(pool, expected):
    """A stop string that begins in the context is none; max_length has the context; all stop where the first beam
    does.
    """
    folder, own = expected[0], own_model(expected[0])
    contexts = [
        "hello",
        "name =",
        "Question: who?\nAnswer:",
        "hello there, this is longer",
    ]
    said = asked(
        own,
        "generate_until",
        *((text, {"until": [], "max_gen_toks": 8}) for text in contexts),
    )
    starts = [text[-1] + answer[0] for text, answer in zip(contexts, said, strict=True)]
    assert all(start.isascii() for start in starts[:3])
    every = [
        (text, {"until": [start], "max_gen_toks": 8})
        for text, start in zip(contexts, starts, strict=True)
    ]
    every += [
        ("hello", {"until": "", "max_gen_toks": 4}),
        ("hello", {"until": ["zq"], "max_gen_toks": 8, "max_length": 12}),
        ("hello", {"until": [said[0][1]], "max_gen_toks": 8, "num_beams": 2}),
    ]
    wanted = asked(own, "generate_until", *every)
    assert wanted[:3] == said[:3]
    assert pool.run(ring_answers, 2, folder, "generate_until", every) == [wanted] * 2


def ring_answers_at_length(
    mesh: DeviceMesh, folder: Path, every: list[tuple[Any, ...]]
) -> Any:
    model, tokenizer = parts(folder)
    model.generation_config.max_new_tokens = 2
    return asked(
        RingLM(rs.parallelize(model, mesh), tokenizer), "generate_until", *every
    )


def test_a_task_sets_the_length_of_an_answer(pool, expected):
    every = [("hello", {"until": [], "max_gen_toks": 8, "pad_token_id": None})]
    wanted = asked(
        own_model(expected[0]),
        "generate_until",
        ("hello", {"until": [], "max_gen_toks": 8}),
    )
    assert pool.run(ring_answers_at_length, 2, expected[0], every) == [wanted] * 2


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32, "factor": 8.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "positions"), [(LONGROPE, 256), (DYNAMIC, 32)], ids=["longrope", "dynamic"]
)
def test_requests_around_the_original_length_share_nothing(
    pool, tmp_path, rope, positions
):
    folder = save(
        tmp_path / "model", max_position_embeddings=positions, rope_parameters=rope
    )
    context = "the quick brown fox jumps ove"
    every = [
        (context, end)
        for end in (
            " a",
            " lazy dogs and some more text",
            " b",
            " lazy dogs and cats",
            "r",
        )
    ]
    texts = [(context,), (context * 3,), (context * 2,)]
    own = own_model(folder, max_length=128)
    for method, requests in (
        ("loglikelihood", every),
        ("loglikelihood_rolling", texts),
    ):
        wanted = flat(asked(own, method, *requests))
        for found in pool.run(ring_limited, 2, folder, method, requests):
            assert flat(found) == pytest.approx(wanted, rel=1e-5)


def ring_limited(
    mesh: DeviceMesh, folder: Path, method: str, every: list[tuple[Any, ...]]
) -> Any:
    return ring_answers(mesh, folder, method, every, max_length=128)


REFUSED = [
    ("loglikelihood", ("a" * 300, "b"), "300 tokens are more than the 256 positions"),
    (
        "loglikelihood",
        ("ab", ""),
        "('ab', '') has no token in its context or its continuation",
    ),
    ("loglikelihood", ("", ""), "has no token"),
    ("loglikelihood", (" ", "x"), "(' ', 'x') has no token"),
    (
        "generate_until",
        ("a" * 250, {"until": ["b"], "max_gen_toks": 9}),
        "a context of 250 tokens and 9 new ones",
    ),
    (
        "generate_until",
        ("ab", {"max_gen_toks": 9, "num_return_sequences": 2}),
        "num_return_sequences=2 is not taken",
    ),
    (
        "generate_until",
        ("ab", {"max_gen_toks": 9, "pad_token_id": 0}),
        "pad_token_id=0 is not taken",
    ),
    (
        "generate_until",
        ("ab", {"max_gen_toks": 9, "stop_strings": "x"}),
        "name them in until",
    ),
    (
        "generate_until",
        ("ab", {"max_gen_toks": 9, "do_sample": True}),
        "needs a temperature above 0",
    ),
    ("generate_until", ("ab", {"max_gen_toks": 0}), "0 new tokens"),
    ("generate_until", ("abcd", {"max_gen_toks": 9, "max_length": 3}), "-1 new tokens"),
]


def refusals(mesh: DeviceMesh, folder: Path) -> list[str]:
    model, tokenizer = parts(folder)
    ring = rs.parallelize(model, mesh)
    lm, said = RingLM(ring, tokenizer), []
    for method, arguments, _ in REFUSED:
        with pytest.raises(ConfigError) as raised:
            asked(lm, method, arguments)
        said.append(str(raised.value))
    answers = asked(lm, "loglikelihood", ("ab", "c"), ("ab", "d"))
    # nothing is left over
    assert answers == asked(
        RingLM(ring, tokenizer), "loglikelihood", ("ab", "c"), ("ab", "d")
    )
    with pytest.raises(
        UnsupportedError, match="use_cache is not supported with several processes"
    ):
        lm.set_cache_hook(None)
    with pytest.raises(ConfigError, match="max_length 0: should be at least 1"):
        RingLM(ring, tokenizer, max_length=0)
    tokenizer.eos_token = tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="neither eos_token nor bos_token"):
        RingLM(ring, tokenizer)
    return said


def test_what_cannot_be_answered_raises_on_every_rank(pool, expected):
    for said in pool.run(refusals, 2, expected[0]):
        for message, (*_, wanted) in zip(said, REFUSED, strict=True):
            assert wanted in message


def test_lm_eval_refuses_in_one_line_what_it_does_not_run(expected):
    from lm_eval.models.dummy import DummyLM

    from ringspan.evaluate.harness.run import known_tasks, run_tasks

    manager = known_tasks(str(expected[1]), TASKS)
    with pytest.raises(
        ConfigError,
        match=r"--tasks local_unsafe: Attempted to run task: local_unsafe which is marked",
    ):
        run_tasks(DummyLM(), ["local_unsafe"], manager)


def test_an_unknown_task_is_named_with_its_neighbours(expected):
    from ringspan.evaluate.harness.run import check_tasks, known_tasks

    manager = known_tasks(str(expected[1]), TASKS)
    check_tasks(TASKS, manager)
    with pytest.raises(
        ConfigError,
        match="local_choise: lm-eval knows no such task; did you mean local_choice",
    ):
        check_tasks(["local_choise"], manager)
    assert torch.is_grad_enabled()


def not_continued(mesh: DeviceMesh, folder: Path, file: Path) -> str:
    model, tokenizer = parts(folder)
    with pytest.raises(UnsupportedError) as raised:
        RingLM(rs.parallelize(model, mesh), tokenizer, answers=file)
    return str(raised.value)


def test_a_model_with_dependent_answers_is_not_resumed(pool, tmp_path):
    folder = save(
        tmp_path / "model", max_position_embeddings=32, rope_parameters=DYNAMIC
    )
    for said in pool.run(not_continued, 2, folder, tmp_path / "kept.jsonl"):
        assert (
            "kept.jsonl': the rotary frequencies of this model depend on the texts that it read before"
            in said
        )
