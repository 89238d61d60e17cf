"""lm-eval's requests that were answered before a kill are not answered again, on any number of ranks."""

from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.core.errors import UnsupportedError
from ringspan.evaluate import RingLM
from tests.evaluate.harness.test_harness import DYNAMIC, parts
from tests.evaluate.models import save


def not_continued(mesh: DeviceMesh, folder: Path, file: Path) -> str:
    model, tokenizer = parts(folder)
    with pytest.raises(UnsupportedError) as raised:
        RingLM(rs.parallelize(model, mesh), tokenizer, answers=file)
    return str(raised.value)


def test_a_model_with_dependent_answers_is_not_resumed(pool, tmp_path):
    folder = save(tmp_path / "model", max_position_embeddings=32, rope_parameters=DYNAMIC)
    for said in pool.run(not_continued, 2, folder, tmp_path / "kept.jsonl"):
        assert "kept.jsonl': the rotary frequencies of this model depend on the texts that it read before" in said
