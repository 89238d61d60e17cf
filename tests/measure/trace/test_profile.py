"""Profiles of real steps: consistent with what else is known of them, drawn to scale, and alive in a browser."""

import json
import shutil

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ringspan.core.geometry.layout import Layout
from ringspan.core.geometry.mask import causal
from ringspan.core.names import CATEGORIES
from ringspan.core.schedule.schedule import make_schedule
from ringspan.measure.trace.dry_run import prepare, trace
from ringspan.measure.trace.profile import PHASES, Profiler, RankProfile, gathered
from ringspan.plan.cost.setting import Setting
from ringspan.report.profile_page import (
    memory_figure,
    page,
    timeline_figure,
    write_report,
)
from ringspan.torch.engine.transport.exchange import COUNTERS
from tests.torch import models

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "vocab_size": 301,
    "max_position_embeddings": 4096,
}
SETTING = Setting(
    length=390, ring=3, compute_dtype="float32", on_gpu=False, loss_chunk_tokens=64
)
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)


def profiled(mesh: DeviceMesh) -> tuple[RankProfile | None, int, float]:
    """The profile, how many hooks it left, and what the rank waited in the third step as the ring's totals know it."""
    torch.manual_seed(0)
    model, optimizer, batch = prepare(models.build("llama", **SIZES), mesh, SETTING)

    def num_hooks() -> int:
        kept = (
            model._forward_pre_hooks,
            model._forward_hooks,
            model.base_model._forward_hooks,
        )
        return sum(
            map(
                len,
                (
                    *kept,
                    optimizer._optimizer_step_pre_hooks,
                    optimizer._optimizer_step_post_hooks,
                ),
            )
        )

    hooks, waited = num_hooks(), 0.0
    profiler = Profiler(model, optimizer, mesh["ring"].get_local_rank())
    for step in range(4):
        before = COUNTERS.exposed_seconds
        with profiler.step():
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 2:
            waited = COUNTERS.exposed_seconds - before
    assert COUNTERS.transfers is None and COUNTERS.hops is None
    return profiler.result, num_hooks() - hooks, waited


@pytest.fixture(scope="module")
def results(pool):
    return pool.run(profiled, 3)


@pytest.fixture(scope="module")
def profiles(results):
    return [profile for profile, _, _ in results]


def test_hops_and_exchanges_are_those_of_the_schedule(profiles):
    layout = Layout("zigzag", SETTING.length, 3)
    # forward and backward of two layers; attention is not computed again
    passes = 2 * 2
    for profile in profiles:
        schedule = make_schedule(layout, causal(), profile.rank)
        pairs = sum(visit["num_pairs"] for visit in profile.visits)
        groups = len(profile.visits) // (passes * len(schedule.hops))
        assert pairs == passes * groups * schedule.num_pairs
        assert [visit["owner"] for visit in profile.visits[:3]] == [
            hop.owner for hop in schedule.hops
        ]
        config = models.config("llama", **SIZES)
        numbers = (
            2
            * config.num_key_value_heads
            * config.hidden_size
            // config.num_attention_heads
        )
        blocks = [each for each in profile.passages if not each["is_gradient"]]
        assert (
            sum(each["sent_bytes"] for each in blocks)
            == passes * schedule.sent_tokens * numbers * 4
        )


def test_times_are_in_order_and_within_the_step(results):
    for profile, hooks, waited in results:
        assert (
            [name for name, _ in profile.phases]
            == list(PHASES)
            == [name for name, _ in profile.memory_phases]
        )
        starts = [start for _, start in profile.phases]
        assert (
            starts == sorted(starts)
            and starts[0] >= 0
            and starts[-1] < profile.step_seconds
        )
        for each in profile.passages:
            assert (
                0
                <= each["posted"]
                <= each["waited"]
                <= each["arrived"]
                <= profile.step_seconds
            )
        for visit in profile.visits:
            assert 0 <= visit["started"] <= visit["ended"] <= profile.step_seconds
        backward, optimizer = starts[2], starts[3]
        gradients = [each for each in profile.passages if each["is_gradient"]]
        assert gradients and all(
            backward < each["posted"] < optimizer for each in gradients
        )
        assert profile.exposed_seconds == pytest.approx(waited, rel=0.2, abs=2e-3)
        assert hooks == 0


def test_the_memory_is_that_of_the_trace(profiles):
    for profile in profiles[1:]:
        traced = trace(models.config("llama", **SIZES), SETTING, profile.rank).peak
        assert profile.peak_bytes == pytest.approx(traced.total_bytes, rel=0.002)
        moments = [
            sum(at)
            for at in zip(*(profile.memory[name] for name in CATEGORIES), strict=True)
        ]
        assert max(moments) == profile.peak_bytes
        phase = profile.memory["phase"][moments.index(profile.peak_bytes)]
        assert phase == {"forward": "loss"}.get(traced.phase, traced.phase)
        assert profile.memory["seconds"] == sorted(profile.memory["seconds"])


def drawn(figure, kind):
    return [
        patch
        for patch in figure.axes[-1].patches
        if (patch.get_gid() or "").startswith(f"{kind}|")
    ]


def test_pictures_are_to_scale(profiles):
    memory = memory_figure(profiles)
    assert len(memory.axes) == 3
    heights = dict.fromkeys(CATEGORIES, 0.0)
    for name, area in zip(CATEGORIES, memory.axes[0].collections, strict=True):
        corners = area.get_paths()[0].vertices
        heights[name] = corners[:, 1].max()
        assert corners[:, 0].max() == pytest.approx(
            1e3 * profiles[0].memory["seconds"][-1]
        )
    assert heights["parameters"] == pytest.approx(
        max(profiles[0].memory["parameters"]) / 1e6
    )
    assert heights["communication"] == pytest.approx(profiles[0].peak_bytes / 1e6)
    assert len(drawn(memory, "spot")) == len(profiles[-1].memory["seconds"])

    bars = drawn(timeline_figure(profiles), "time")
    waits = [bar.get_path().get_extents() for bar in bars if "|waits" in bar.get_gid()]
    assert {round(bar.y0 + 0.4) for bar in waits} == {0, 2, 4}
    assert sum(bar.width for bar in waits) == pytest.approx(
        1e3 * sum(p.exposed_seconds for p in profiles)
    )
    hops = [bar for bar in bars if "|block of rank" in bar.get_gid()]
    assert len(hops) == sum(len(profile.visits) for profile in profiles)
    assert len(bars) == len(hops) + 2 * len(waits)


def test_the_peak_stays_where_moments_are_left_out(profiles):
    [axes] = memory_figure(profiles[:1], 40).axes
    assert axes.collections[-1].get_paths()[0].vertices[:, 1].max() == pytest.approx(
        profiles[0].peak_bytes / 1e6
    )
    assert len(axes.patches) == 40


def test_the_files_are_written(profiles, tmp_path):
    paths = write_report(profiles, tmp_path / "new", "a <b> & c")
    assert [path.name for path in paths] == [
        "report.html",
        "memory.png",
        "timeline.png",
        "profile.json",
    ]
    text = paths[0].read_text(encoding="utf-8")
    assert "a &lt;b&gt; &amp; c" in text and len(text) < 5_000_000
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:3])
    read = json.loads(paths[3].read_text(encoding="utf-8"))
    assert [each["rank"] for each in read] == [0, 1, 2] and read[0][
        "passages"
    ] == profiles[0].passages


@pytest.mark.long
def test_many_ranks_stay_below_five_megabytes(profiles):
    assert len(page(profiles * 20, "sixty ranks")) < 5_000_000


def gathered_from(mesh: DeviceMesh) -> int:
    model, optimizer, _ = prepare(models.build("llama", **SIZES), mesh, SETTING)
    return len(gathered(Profiler(model, optimizer, 0)))


def test_all_ranks_get_all_profiles(pool):
    assert pool.run(gathered_from, 4) == [4] * 4
