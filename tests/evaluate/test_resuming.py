"""``ringspan eval`` that is killed goes on after its last item: no item twice, and the answers of one process."""

import json
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ringspan.cli.main import main
from ringspan.evaluate.records import Records
from ringspan.evaluate.settings import EvalSettings
from ringspan.generate.session import Session
from ringspan.torch.runtime.forks import serve_forks, settle
from tests.evaluate.models import plain_tokens, save

RANKS, ITEMS = 2, 4


def rank(
    number: int, port: int, asked: list[str], place: Path, killed_after: int | None
) -> None:
    """What torchrun starts: a rank of the command, which is killed after so many items, and notes how many it had."""
    settle()
    found = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in found.items()} | {
        "MASTER_ADDR": "localhost"
    }
    sys.argv = ["ringspan", "eval", *asked]
    answered, add = 0, Records.add

    def count(*args: Any, **options: Any) -> Any:
        nonlocal answered
        answered += 1
        return answer(*args, **options)

    def keep(records: Records, record: dict[str, Any]) -> None:
        add(records, record)
        if len(records.by_key) == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    answer = Session.answer
    with (
        open(place / f"out-{number}", "w") as out,
        open(place / f"err-{number}", "w") as err,
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(Session, "answer", count),
        mock.patch.object(Records, "add", keep),
    ):
        try:
            main()
        finally:
            print(f"answered {answered}", file=err)


def under_torchrun(
    asked: list[str], place: Path, killed_after: int | None = None
) -> list[int | None]:
    place.mkdir()
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    serve_forks("ringspan.evaluate.runner")
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=rank, args=(at, port, asked, place, killed_after))
        for at in range(RANKS)
    ]
    for one in ranks:
        one.start()
    ranks[0].join(100)
    if killed_after is not None:
        for one in ranks[1:]:  # as torchrun ends them
            one.kill()
    for one in ranks:
        one.join(100)
    return [one.exitcode for one in ranks]


@pytest.mark.skipif(sys.platform != "linux", reason="forks of a server")
def test_a_killed_run_resumes_after_its_last_item(tmp_path):
    # Of such a width and depth it says something else for each text.
    folder = save(
        tmp_path / "tiny",
        max_position_embeddings=1024,
        hidden_size=64,
        num_hidden_layers=1,
    )
    kept = tmp_path / "kept"
    asked = [
        "lines",
        str(folder),
        "--lengths",
        "700",
        "--items",
        str(ITEMS),
        "--out",
        str(kept),
        "--json",
    ]
    assert (
        under_torchrun(asked, tmp_path / "first", killed_after=3)[0] == -signal.SIGKILL
    )
    (file,) = kept.glob("*.jsonl")
    before = file.read_text().splitlines()
    assert len(before) == 3

    second = tmp_path / "second"
    assert under_torchrun(asked, second) == [0] * RANKS
    lines = file.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert lines[:3] == before and [record["key"] for record in records] == [
        [700, None, at] for at in range(ITEMS)
    ]
    settings = EvalSettings(
        folder=str(folder), task="lines", lengths=(700,), items=ITEMS
    )
    wanted = plain_tokens(settings)
    assert [record["token_ids"] for record in records] == wanted and len(
        set(map(tuple, wanted))
    ) == ITEMS
    said = [(second / f"err-{at}").read_text() for at in range(RANKS)]
    assert all("answered 1\n" in text for text in said), (
        "each rank had the last item alone"
    )
    assert f"tiny: 3 of 4 items are in {file}; continuing after them" in said[0]
    result = json.loads((second / "out-0").read_text())
    assert result["rows"][0]["items"] == ITEMS and (second / "out-1").read_text() == ""
