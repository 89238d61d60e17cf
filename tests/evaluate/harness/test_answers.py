"""lm-eval's requests that were answered before a kill are not answered again, on any number of ranks."""

import io
import json
import os
import signal
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoTokenizer

import ringspan as rs
from ringspan.cli.commands.evaluate import harness_rank
from ringspan.core.errors import UnsupportedError
from ringspan.evaluate import RingLM
from ringspan.evaluate.records import Answers
from ringspan.evaluate.settings import HarnessSettings
from ringspan.torch.runtime.launch import launch
from tests.evaluate.harness.data import TASKS, write
from tests.evaluate.harness.test_harness import DYNAMIC, own_model, parts
from tests.evaluate.models import save


def counted(settings: HarnessSettings, out: str, killed_after: int | None) -> tuple[Any, list[str], str]:
    """What a rank returns, the kinds of requests that it answered, and what it said; rank 0 is killed after so many."""
    methods, add = [], Answers.add

    def keep(answers: Answers, method: str, asked: tuple[Any, ...], answer: Any) -> None:
        add(answers, method, asked, answer)
        methods.append(method)
        if len(methods) == killed_after and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Answers, "add", keep), redirect_stderr(io.StringIO()) as err:
        return harness_rank(settings, out), methods, err.getvalue()


@pytest.mark.long
def test_a_killed_run_answers_the_rest_and_equals_lm_eval(tmp_path):
    from lm_eval import simple_evaluate

    from ringspan.evaluate.harness.run import known_tasks, rows_of

    folder, out = save(tmp_path / "model", max_position_embeddings=256), tmp_path / "kept"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.save_pretrained(folder)
    (tmp_path / "tasks").mkdir()
    tasks = str(write(tmp_path / "tasks"))
    settings = HarnessSettings(folder=str(folder), tasks=TASKS, include=tasks)
    with pytest.raises(RuntimeError, match="rank 0 failed: killed by SIGKILL"):
        launch(counted, 2, settings, str(out), 7, threads=1)
    (file,) = out.glob("*.jsonl")
    before = file.read_text().splitlines()
    assert len(before) == 7

    (found, answered, said), *_, (other, same, nothing) = launch(counted, 3, settings, str(out), None, threads=1)
    line = f"7 answers are in {file}; continuing after them"
    assert line in said and line not in nothing
    plain: Any = simple_evaluate
    expected = rows_of(
        plain(own_model(folder), tasks=list(TASKS), task_manager=known_tasks(tasks, TASKS), bootstrap_iters=0)
    )
    assert found["rows"] == [{**row, "value": pytest.approx(row["value"], rel=1e-5)} for row in expected]
    assert found["records"] == str(file) and other is None
    lines = file.read_text().splitlines()
    keys = [tuple(json.loads(line)["key"]) for line in lines]
    # 10 continuations, 4 texts, 4 contexts; 4 more are answered by what is drawn, and those are not kept.
    assert lines[:7] == before and len(set(keys)) == len(keys) == 10 + 4 + 4
    assert answered == same and len(answered) == 10 + 4 + 4 - 7 + 4


def not_continued(mesh: DeviceMesh, folder: Path, file: Path) -> str:
    model, tokenizer = parts(folder)
    with pytest.raises(UnsupportedError) as raised:
        RingLM(rs.parallelize(model, mesh), tokenizer, answers=file)
    return str(raised.value)


def test_a_model_with_dependent_answers_is_not_resumed(pool, tmp_path):
    folder = save(tmp_path / "model", max_position_embeddings=32, rope_parameters=DYNAMIC)
    for said in pool.run(not_continued, 2, folder, tmp_path / "kept.jsonl"):
        assert "kept.jsonl': the rotary frequencies of this model depend on the texts that it read before" in said
