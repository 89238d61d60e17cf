"""A loop of the user's own in which a rank does not come: its name is said, and with a watchdog each process ends."""

import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

import ringspan as rs
from ringspan.core.errors import EXIT_PEER_LOST, EXIT_STALLED
from ringspan.torch.model.consistency import loop_watch, watchdog
from ringspan.torch.runtime.mesh import set_timeout
from tests.cases import long
from tests.ranks import ended


def loop(what, folder, seconds=None):
    """Two steps, then ``what``. The ring's time-out is ``seconds`` once all that is slow to import is there."""
    from tests.torch.models import build, tokens

    loop_watch._LEAVING_SECONDS = 1.0
    rank, mesh = dist.get_rank(), rs.init_mesh(ring=2)
    ids = tokens(1, 16)
    batch = rs.shard_batch({"input_ids": ids, "labels": ids}, mesh)
    if seconds:
        rs.parallelize(build("llama"), mesh)(**batch).loss.backward()
        set_timeout(mesh["ring"].get_group(), seconds)
    watched = not what.startswith("by default")
    model = rs.parallelize(
        build("llama"), mesh, **{"watchdog": True} if watched else {}
    )
    # with its port
    assert any(thread.name == "watchdog" for thread in threading.enumerate()) is watched
    for _ in range(2):
        model(**batch).loss.backward()
    match what:
        case "rank 0 saves alone at the end" if rank == 0:
            model.save_pretrained(folder)
        case "rank 1 leaves the loop" | "by default" if rank == 0:
            model(**batch)
        case "rank 1 stays outside":
            if rank == 0:
                model(**batch)
            time.sleep(60)
        case "rank 1 skips backward":
            loss = model(**batch).loss
            if rank == 0:
                loss.backward()
            time.sleep(60)
        case "rank 1 dies":
            if rank == 1:
                os._exit(3)
            model(**batch)
        case "rank 1 fails":
            if rank == 1:
                raise KeyError("no such column")
            model(**batch)
        case "by default, in backward":
            loss = model(**batch).loss
            if rank == 1:
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
        case "nothing":
            time.sleep(seconds * rank)  # one after the other is no reason to complain


LEFT = (
    r"rank 1 ended at step 2.* \(outside of ringspan\), which others wait for at step"
)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rank 0 saves alone at the end", LEFT),
        *long(("rank 1 leaves the loop", LEFT)),
        ("rank 1 dies", "rank 1 died at step "),
        ("rank 1 fails", "rank 1 failed with KeyError: 'no such column'"),
    ],
)
def test_a_rank_that_is_gone_is_named_at_once(tmp_path, what, message):
    codes, errors = ended(tmp_path, loop, what, tmp_path / "model")
    assert codes[0] == EXIT_PEER_LOST and re.search(message, errors[0]), errors[0]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("what", "step"), [("rank 1 stays outside", 2), *long(("rank 1 skips backward", 3))]
)
def test_a_rank_that_stays_away_is_named_within_the_time_out(tmp_path, what, step):
    codes, errors = ended(tmp_path, loop, what, tmp_path, 4)
    assert codes == [EXIT_STALLED, EXIT_STALLED]
    message = rf"rank 1 at step {step}.* \(outside of ringspan\) \(furthest behind\)"
    assert all(re.search(message, error) for error in errors), errors


@pytest.mark.alone
def test_a_slow_loop_and_ranks_that_end_in_turn_are_not_hangs(tmp_path):
    codes, errors = ended(tmp_path, loop, "nothing", tmp_path, 4)
    assert codes == [0, 0] and not any("ringspan:" in error for error in errors), errors


@pytest.mark.parametrize(
    ("what", "call", "code"),
    [
        ("by default", "a forward pass", 0),
        ("by default, in backward", "a backward pass", -signal.SIGKILL),
    ],
)
def test_by_default_torch_ends_and_a_line_names_who_is_missing(
    tmp_path, what, call, code
):
    codes, errors = ended(tmp_path, loop, what, tmp_path)
    assert codes == [1, code], errors  # the first is that of torch's own error
    assert (
        errors[0].count(
            f"ringspan: rank 0 lost an exchange in {call}; no word from rank 1\n"
        )
        == 1
    ), errors


def test_a_job_that_is_stopped_and_continued_is_not_silent(monkeypatch, tmp_path):
    """A minute in which no rank runs, as a scheduler suspends a job, and then a rank that stays silent."""
    clock, named, steps = [0.0], [], iter([*[0.2] * 9, 60.0, *[0.2] * 99])
    select = Mock(
        side_effect=lambda seconds: clock.append(clock[-1] + next(steps)) or []
    )
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    monkeypatch.setattr(watchdog.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 2)
    watch = watchdog.Watchdog(
        watchdog.Limits(silence_seconds=10),
        tmp_path,
        lambda code: named.append(clock[-1]),
    )
    watch._selector, watch._server = (
        SimpleNamespace(select=select),
        Mock(**{"accept.side_effect": BlockingIOError}),
    )
    watch._places = {rank: watchdog.Place(changed=0.0, heard=0.0) for rank in range(2)}
    watch._watch()
    assert len(named) == 1 and 9 < named[0] - (60.0 - watchdog._PAUSE_SECONDS) < 11
