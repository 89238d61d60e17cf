"""A rank that is killed while weights are read or written: the other one names it, and no half is taken for a model."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import ringspan as rs
from ringspan.torch.model.weights import files, shards
from tests.cases import long
from tests.every_model.tiny import tiny_model
from tests.every_model.weights import SMALL_FILES, differences, stored, written
from tests.ranks import ended


def load_and_save(what: str, victim: int, folder: Path) -> None:
    def die_after(kind: type, number: int) -> None:
        read, left = kind.read, [number]

        def dying(self, region):
            left[0] -= 1
            if left[0] == 0:
                os._exit(3)
            return read(self, region)

        if dist.get_rank() == victim:
            kind.read = dying

    mesh = rs.init_mesh(ring=2)
    if what == "load":
        die_after(files._Stored, 30)  # some of which are for trials
    model = rs.from_pretrained(folder / "given", mesh)
    if what == "hand over":
        die_after(shards.Shards, 9)
        for _ in rs.named_weights(model):
            pass
    if what == "save":
        die_after(shards.Shards, 9)
    model.save_pretrained(folder / "saved", max_shard_size=SMALL_FILES)


@pytest.mark.parametrize(
    ("what", "victim", "doing"),
    [
        *long(
            ("load", 1, "loading the (model|weights)"), ("save", 1, "saving the model")
        ),
        ("save", 0, "saving the model"),
        *long(
            ("hand over", 1, "handing over weights"),
            ("hand over", 0, "handing over weights"),
        ),
    ],
)
def test_a_rank_that_dies_is_named_and_what_was_there_stays(
    tmp_path: Path, what: str, victim: int, doing: str
):
    written("llama", tmp_path / "given")
    tiny_model("qwen2").save_pretrained(tmp_path / "saved")
    before = stored(tmp_path / "saved")
    codes, errors = ended(tmp_path, load_and_save, what, victim, tmp_path)
    other = 1 - victim
    assert codes[victim] == 3 and codes[other] == 1, errors
    assert re.search(
        rf"lost an exchange in {doing}; no word from rank {victim}\n", errors[other]
    ), errors[other]
    assert not differences(stored(tmp_path / "saved"), before)
    assert not list((tmp_path / "saved").glob("*.index.json"))
