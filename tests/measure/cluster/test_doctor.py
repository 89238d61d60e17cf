"""What ranks find out about each other, with one of them made odd, and the whole examination."""

import os
import re
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringspan as rs
from ringspan.measure.cluster import cluster, doctor, host, trial
from ringspan.measure.cluster.cluster import (
    clock_offsets,
    examine_ranks,
    listeners,
    listening,
    problems_between,
)
from ringspan.measure.cluster.trial import Trial
from ringspan.torch.engine.kernels.partials import partial as softmax
from ringspan.torch.runtime.requirements import pip_command
from tests.cases import long

# Two listening sockets, one of them open to every network, and a connection.
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 101 1
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 102 1
   2: 0100007F:1F90 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 103 1
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 201 1
   1: 00000000000000000000000000000000:7530 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 202 1
"""


def test_listening_sockets_are_read_from_the_kernel():
    assert listeners(TCP) == [("127.0.0.1:8080", "101"), ("0.0.0.0:22", "102")]
    assert listeners(TCP6) == [("[::1]:80", "201"), ("[::]:30000", "202")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_a_port_that_this_process_opens_is_found():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert address not in listening(os.getpid())
        server.listen()
        assert address in listening(os.getpid())
    assert listening(1 << 30) is None


def examined(mesh: DeviceMesh, odd_rank: int | None = None) -> dict:
    cluster._MESSAGE_BYTES["cpu"] = 1 << 20
    known, clock = cluster.versions, time.time
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == odd_rank:
            patch.setattr(cluster, "versions", lambda: known() | {"torch": "2.0.0"})
            patch.setattr(time, "time", lambda: clock() + 100)
        return examine_ranks(mesh["ring"].get_group())


@pytest.mark.parametrize("ranks", [1, *long(2, 4), 3])
def test_every_link_is_measured_and_all_ranks_know_all(pool, ranks):
    results = pool.run(examined, ranks)
    assert all(result["links"] == results[0]["links"] for result in results)
    links = results[0]["links"]
    assert [(link["from"], link["to"]) for link in links] == [
        (r, (r + 1) % ranks) for r in range(ranks) if ranks > 1
    ]
    assert all(0 < link["bytes_per_second"] < 1e12 for link in links)
    assert (results[0]["bandwidth_bytes_per_second"] is None) == (ranks == 1)
    assert len(results[0]["ranks"]) == ranks
    assert all(
        abs(x) <= results[0]["clock_uncertainty_seconds"]
        for x in results[0]["clock_offset_seconds"]
    )
    assert not [problem for problem in problems_between(results[0]) if problem.stops]


def test_the_rank_that_differs_is_named(pool):
    result = pool.run(examined, 3, 1)[0]
    found = {
        problem.what.split(" is ")[0]: problem for problem in problems_between(result)
    }
    version = next(
        problem for what, problem in found.items() if what.startswith("rank 1 on")
    )
    assert "has torch 2.0.0, most have" in version.what and version.stops
    clock = next(
        problem
        for problem in found.values()
        if problem.what.startswith("the clock of rank 1")
    )
    ahead = float(re.search(r"is ([\d.]+) s ahead of", clock.what)[1])
    assert (
        abs(ahead - 100) <= 0.05 + result["clock_uncertainty_seconds"]
        and not clock.stops
    )
    assert not [
        problem
        for problem in found.values()
        if "rank 0 on" in problem.what and problem.stops
    ]


def offsets(mesh: DeviceMesh, ahead: float) -> tuple[list[float], float]:
    clock = time.time
    with pytest.MonkeyPatch.context() as patch:
        if mesh["ring"].get_local_rank() == 1:
            patch.setattr(time, "time", lambda: clock() + ahead)
        return clock_offsets(mesh["ring"].get_group())


@pytest.mark.parametrize("ahead", [0.0, 3.0, -0.5])
def test_a_clock_is_off_by_what_it_is_off(pool, ahead):
    found, error = pool.run(offsets, 2, ahead)[0]
    assert found[0] == 0 and abs(found[1] - ahead) <= error < 1


FACT = {
    "host": "a",
    "device": "cpu",
    "versions": {"torch": "2.13.0"},
    "listens": [],
    "launcher_listens": [],
}
FINE = {
    "clock_offset_seconds": [0.0] * 3,
    "clock_uncertainty_seconds": 0.0,
    "links": [],
}


def test_slow_links_other_devices_and_open_ports_are_named():
    assert problems_between(FINE | {"ranks": [FACT] * 3}) == []
    links = [
        {"from": r, "to": (r + 1) % 3, "bytes_per_second": rate}
        for r, rate in enumerate((9e9, 8e9, 1e9))
    ]
    [slow] = problems_between(FINE | {"ranks": [FACT] * 3, "links": links})
    assert "from rank 2 (a) to rank 0 (a) carries 1.00 GB/s" in slow.what
    [other] = problems_between(
        FINE | {"ranks": [FACT, FACT, FACT | {"device": "A100"}]}
    )
    assert other.what == "rank 2 on a has A100, most have cpu"
    listens = {
        "listens": ["127.0.0.1:1", "10.0.0.7:2", "0.0.0.0:3"],
        "launcher_listens": ["[::]:4"],
    }
    ports = problems_between(FINE | {"ranks": [FACT, FACT, FACT | listens]})
    assert [problem.what.split(",")[0] for problem in ports] == [
        "rank 2 on a listens on 0.0.0.0:3",
        "the launcher of rank 2 on a listens on [::]:4",
    ]


def error_of_the_ring(mesh: DeviceMesh, is_broken: bool) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if is_broken:
            patch.setattr(
                softmax.torch,
                "logaddexp",
                lambda a, b, out=None: out if out is not None else a,
            )
        return doctor.ring_error(mesh["ring"].get_group())


def test_a_ring_that_computes_wrongly_is_found(pool):
    assert max(pool.run(error_of_the_ring, 3, False)) < 1e-6
    assert min(pool.run(error_of_the_ring, 3, True)) > 1e-3


def speeds(matmul: float) -> list[dict]:
    return [
        {"what": what, "dtype": "bfloat16", "flops": matmul}
        for what in ("matmul", "attention")
    ]


def test_the_report_says_what_stops_and_what_does_not():
    ranks = {
        "ranks": [FACT] * 3,
        "bandwidth_bytes_per_second": 2e9,
        "speeds": [*map(speeds, (4e12, 4e12, 1e12))],
    }
    result = doctor.report(FINE | ranks | {"ring_error": 3e-7})
    assert (
        result["can_train"]
        and result["flops"] == 1e12
        and result["min_block_tokens"] == 500
    )
    assert [p["what"].split(" at ")[0] for p in result["problems"]] == [
        "rank 2 on a multiplies"
    ]
    for error in (1e-3, float("nan")):
        result = doctor.report(FINE | ranks | {"ring_error": error})
        assert (
            not result["can_train"]
            and "is wrong: relative error" in result["problems"][-1]["what"]
        )


def test_too_old_packages_and_missing_back_ends_stop(monkeypatch):
    monkeypatch.setattr(doctor, "package_version", {"torch": "2.10.1"}.get)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    old, absent, no_gloo = doctor._problems_here(torch.device("cpu"))
    assert (
        re.fullmatch(r"torch is 2\.10\.1, >=2\.11,<2\.\d+ is needed", old.what)
        and old.stops
    )
    assert old.remedy == pip_command("torch")
    assert absent.what.startswith("transformers is none, >=5.17,<5.") and absent.stops
    assert no_gloo.what.startswith("torch has no gloo") and no_gloo.stops
    monkeypatch.undo()
    assert [*doctor._problems_here(torch.device("cpu"))] == []


def test_a_newer_package_is_named_and_does_not_stop(monkeypatch):
    monkeypatch.setattr(
        doctor,
        "package_version",
        {"torch": "2.99.0+cu140", "transformers": "5.17.0"}.get,
    )
    [newer] = doctor._problems_here(torch.device("cpu"))
    assert (
        newer.what
        == "torch is 2.99.0+cu140, newer than any release that ringspan was tried with"
    )
    assert newer.remedy == pip_command("torch") and not newer.stops
    [failed] = doctor._problems_of(Trial(failure="AttributeError: no such group"))
    assert failed.stops and failed.remedy == pip_command("torch")


def test_what_a_release_of_torch_lacks_stops(monkeypatch):
    monkeypatch.setattr(doctor, "missing", lambda: iter(["FSDPModule.reshard"]))
    [lacking] = doctor._problems_here(torch.device("cpu"))
    assert (
        lacking.what
        == f"torch {torch.__version__} lacks FSDPModule.reshard, which ringspan needs"
        and lacking.stops
    )


def tried(mesh: DeviceMesh, fault: str | None) -> Trial:
    """Try to train with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "is wrong" and dist.get_rank() == 1:
            # on all ranks: one alone would leave the pool in the middle of an exchange
            patch.setattr(
                softmax.torch,
                "logaddexp",
                lambda a, b, out=None: out if out is not None else a,
            )
        if fault == "raises":
            patch.setattr(trial, "small_llama", lambda _: 1 / 0)
        return trial.try_training(mesh)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_is_trained(pool, ranks):
    for outcome in pool.run(tried, ranks, None):
        assert outcome.failure is None and outcome.error < 1e-6 and outcome.seconds > 0
        assert [*doctor._problems_of(outcome)] == []


def test_a_model_that_does_not_train_stops(pool):
    outcome = doctor.outcome_of(pool.run(tried, 2, "raises"))
    assert outcome.failure.endswith("ZeroDivisionError: division by zero")
    [problem] = doctor._problems_of(outcome)
    assert (
        problem.stops
        and "a model of two layers does not train here: rank " in problem.what
    )


def test_a_model_that_trains_wrongly_stops(pool):
    outcomes = pool.run(tried, 2, "is wrong")
    assert len({outcome.error for outcome in outcomes}) == 1, "all ranks know"
    [problem] = doctor._problems_of(outcomes[0])
    assert (
        problem.stops
        and "trains wrongly here: its losses differ from one process by" in problem.what
    )
    assert [
        problem.stops for problem in doctor._problems_of(Trial(error=float("nan")))
    ] == [True]


def test_the_first_failure_is_the_one_that_is_told():
    late, first = (
        Trial(failure="RuntimeError: timed out", failed_at=9.0),
        Trial(failure="KeyError: 'x'", failed_at=3.0),
    )
    assert (
        doctor.outcome_of([late, first, Trial(1e-7, 1.0)]).failure
        == "rank 1: KeyError: 'x'"
    )
    assert doctor.outcome_of([Trial(1e-7, 1.0)] * 2) == Trial(1e-7, 1.0)


def test_ranks_that_do_not_meet_are_a_problem_that_stops(monkeypatch):
    def fail(*_):
        raise RuntimeError("rank 1 failed: no route to host")

    monkeypatch.setattr(doctor, "launch", fail)
    monkeypatch.setattr(doctor, "measure_speeds", lambda _: speeds(1e12))
    result = doctor.examine(2)
    assert (
        not result["can_train"]
        and result["bandwidth_bytes_per_second"] is result["min_block_tokens"] is None
    )
    assert (
        "do not come together: rank 1 failed: no route to host"
        in result["problems"][-1]["what"]
    )


def examined_job(mesh: DeviceMesh) -> tuple[dict, bool]:
    cluster._MESSAGE_BYTES["cpu"] = 1 << 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        # the pool has joined already, and stays together
        patch.setattr(doctor, "join", lambda timeout: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        return doctor.examine_job()


@pytest.mark.long
def test_a_job_of_torchrun_is_examined_by_its_own_ranks(pool):
    results = pool.run(examined_job, 4)
    assert [is_first for _, is_first in results] == [True, False, False, False]
    assert all(
        result["can_train"] and len(result["cluster"]["links"]) == 4
        for result, _ in results
    )


def test_a_rank_that_does_not_meet_the_others_says_where(monkeypatch):
    def fail(timeout):
        raise RuntimeError("the client socket has timed out\nmore")

    for name, value in (
        ("RANK", "3"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_PORT", "29500"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "join", fail)
    monkeypatch.setattr(doctor, "measure_speeds", lambda _: speeds(1e12))
    result, shows = doctor.examine_job()
    assert shows and not result["can_train"]
    expected = "rank 3 does not meet the others at 10.0.0.1:29500: the client socket has timed out"
    assert result["problems"][-1]["what"] == expected


def test_fewer_than_one_rank_is_refused():
    with pytest.raises(rs.ConfigError, match="at least 1"):
        doctor.examine(0)


def test_the_host_takes_some_time_for_a_layer(monkeypatch):
    """Of steps that take a fixed time and one for each layer, the second is told, per pass."""
    monkeypatch.setattr(host, "_step_seconds", lambda layers: 0.5 + 0.004 * layers)
    assert host.launch_seconds() == pytest.approx(0.002)


def launch_seconds(mesh):
    return host.launch_seconds()


def test_a_small_model_is_timed(pool):
    [found] = pool.run(launch_seconds, 1)
    assert 1e-5 < found < 1
