"""``RingLM`` gives item by item what lm-eval's own model of transformers gives on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer

import ringspan as rs
from ringspan.core.errors import ConfigError
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
    from ringspan.evaluate.harness.lm import known_tasks, run_tasks

    return run_tasks(lm, TASKS, known_tasks(folder, TASKS))


def on_ring(mesh: DeviceMesh, model_folder: Path, folder: str) -> Any:
    model, tokenizer = parts(model_folder)
    lm = RingLM(rs.parallelize(model, mesh), tokenizer)
    type(lm.model).ring_prefill_tokens = 11
    found = evaluated(lm, folder)
    return samples(found), {name: found["results"][name] for name in TASKS}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    from lm_eval.models.huggingface import HFLM

    folder = save(tmp_path_factory.mktemp("harness") / "model", max_position_embeddings=256)
    tasks = write(tmp_path_factory.mktemp("tasks"))
    model, tokenizer = parts(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    plain: Any = HFLM  # its decorator hides its parameters
    found = evaluated(plain(pretrained=model, tokenizer=tokenizer, batch_size=1), str(tasks))
    return folder, tasks, samples(found), {name: found["results"][name] for name in TASKS}


def flat(value: Any) -> list[Any]:
    return [each for part in value for each in flat(part)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_answers_as_lm_evals_own_model(pool, expected, ranks):
    folder, tasks, wanted, scores = expected
    for found, found_scores in pool.run(on_ring, ranks, folder, str(tasks)):
        for name in TASKS:
            one, other = flat(found[name]), flat(wanted[name])
            assert len(one) == len(other) > 3
            for mine, theirs in zip(one, other, strict=True):
                assert mine == (pytest.approx(theirs, rel=1e-5) if isinstance(theirs, float) else theirs), name
            assert found_scores[name].keys() == scores[name].keys()
            for key, value in scores[name].items():
                assert found_scores[name][key] == (
                    pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
                )


def too_long(mesh: DeviceMesh, folder: Path) -> list[str]:
    from lm_eval.api.instance import Instance

    model, tokenizer = parts(folder)
    lm = RingLM(rs.parallelize(model, mesh), tokenizer)
    said = []
    for ask, arguments in (
        (lm.loglikelihood, ("a" * 300, "b")),
        (lm.generate_until, ("a" * 250, {"until": ["b"], "max_gen_toks": 9})),
    ):
        request = Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)
        with pytest.raises(ConfigError) as raised:
            ask([request], disable_tqdm=True)
        said.append(str(raised.value))
    return said


def test_what_is_too_long_raises_on_every_rank(pool, expected):
    for scored, written in pool.run(too_long, 2, expected[0]):
        assert "300 tokens are more than the 256 positions" in scored
        assert "a context of 250 tokens and 9 new ones" in written


def test_an_unknown_task_is_named_with_its_neighbours(expected):
    from ringspan.evaluate.harness.lm import check_tasks, known_tasks

    manager = known_tasks(str(expected[1]), TASKS)
    check_tasks(TASKS, manager)
    with pytest.raises(ConfigError, match="local_choise: lm-eval knows no such task; did you mean local_choice"):
        check_tasks(["local_choise"], manager)
    assert torch.is_grad_enabled()
