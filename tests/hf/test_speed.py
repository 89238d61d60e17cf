"""A trainer with ``watch_speed`` compares its ranks and logs what it sees."""

import json
from typing import Any

from ringspan.torch.engine.transport.exchange import COUNTERS
from tests.hf.trainers import plain


def watched(mesh: Any, folder: str) -> Any:
    options = {"max_steps": 6, "eval_strategy": "no"}
    trainer = plain(mesh, "llama", {"watch_speed": True}, folder, options)
    trainer.train()
    return trainer.state.log_history, COUNTERS.hops


def test_a_trainer_logs_the_speed_of_its_ranks(world, tmp_path):
    for history, records in world(2).run(watched, 2, str(tmp_path)):
        logged = [one["step"] for one in history if "slowest_rank_ratio" in one]
        assert logged == [4, 5, 6] and records is None
        assert all(
            one["slowest_rank"] in (0, 1)
            for one in history
            if one["step"] in logged and "loss" in one
        )
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").open()]
    assert len(lines[0]["hosts"]) == 2 and [each["step"] for each in lines[1:]] == [4]
