"""What is wrong with a draw is told: other numbers, ranks that differ, refusals that come late or by no rule."""

import pytest
import torch

from tests.combinations import judging
from tests.combinations.judging import Outcome, judge, shrunk
from tests.combinations.runs import Found, Refused, on_one_process
from tests.combinations.tables import read
from tests.pool import Pool


class Answers(Pool):
    """Ranks that answer what they are given, or raise it."""

    def __init__(self, *answers):
        self.size, self._answers = 4, answers

    def outcomes(self, function, ranks, *args, **shape):
        if isinstance(self._answers[0], TimeoutError):
            raise self._answers[0]
        return [*self._answers]

    def restart(self):
        pass


def plain(tmp_path, line=""):
    return on_one_process(read(line), read(line), tmp_path, torch.float64)


def changed(found, **fields):
    return found._replace(**fields)


def test_other_numbers_than_those_of_one_process_differ(tmp_path):
    draw, found = (
        read("between=generation; clip=0.1"),
        plain(tmp_path, "between=generation; clip=0.1"),
    )
    assert judge(Answers(found, found), draw).kind == "equal"
    name = "model.layers.1.mlp.up_proj.weight"
    (replica, text), *_ = found.events
    for wrong, said in (
        (
            {"losses": [found.losses[0], found.losses[1] * (1 + 1e-8)]},
            "losses 1e-08 > 1e-09",
        ),
        ({"losses": [found.losses[0], found.losses[1] * torch.nan]}, "losses inf"),
        (
            {"gradients": found.gradients | {name: found.gradients[name] * (1 + 1e-7)}},
            "gradients 1e-07",
        ),
        (
            {"weights": found.weights | {name: found.weights[name] * (1 + 1e-7)}},
            "weights 1e-07",
        ),
        ({"norms": [norm * 2 for norm in found.norms]}, "norms 1 >"),
        ({"events": [(replica, text.roll(1))]}, "events 1 >"),
    ):
        outcome = judge(Answers(found, changed(found, **wrong)), draw)
        assert (
            outcome.kind == "differs" and said in outcome.said and not outcome.is_right
        )


def test_missing_gradients_and_events_are_no_agreement(tmp_path):
    found = plain(tmp_path)
    with pytest.raises(AssertionError, match="only one side has"):
        judge(Answers(changed(found, gradients={})), read(""))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        judge(Answers(changed(found, losses=found.losses[:1])), read(""))


def test_a_draw_that_does_not_train_alone_is_told(tmp_path, monkeypatch):
    found = plain(tmp_path)

    def raising(*_):
        raise TypeError("where() received None")

    monkeypatch.setattr(judging, "on_one_process", raising)
    outcome = judge(Answers(found), read(""))
    assert outcome.kind == "not on one process" and not outcome.is_right
    assert outcome.said == "TypeError: where() received None"


REFUSED = Refused(
    "ConfigError", "offload='activations' moves what checkpointing keeps", 0
)
OFFLOADED = "checkpoint=none; offload=activations"


@pytest.mark.parametrize(
    ("answers", "line", "kind"),
    [
        ((REFUSED, REFUSED), OFFLOADED, "refused"),
        ((REFUSED, REFUSED), "", "refused without a rule"),
        (
            (REFUSED._replace(message="use another one"),),
            OFFLOADED,
            "refused without a rule",
        ),
        ((Found([], {}, [], [], {}),), OFFLOADED, "not refused"),
        (
            (REFUSED, REFUSED._replace(message="rank 1 has another reason")),
            OFFLOADED,
            "crashed",
        ),
        ((REFUSED, Found([], {}, [], [], {})), OFFLOADED, "crashed"),
        ((REFUSED, REFUSED._replace(posts=3)), OFFLOADED, "crashed"),
        ((REFUSED, ValueError("of no kind of ours")), OFFLOADED, "crashed"),
        ((TimeoutError("no answer"),), "", "hung"),
    ],
)
def test_refusals_come_from_all_ranks_by_a_rule_and_at_once(answers, line, kind):
    outcome = judge(Answers(*answers), read(line))
    assert outcome.kind == kind and outcome.is_right is (kind == "refused")


def test_a_rank_that_failed_first_is_the_one_that_is_told():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert (
        "by zero" in judge(Answers(lost, ZeroDivisionError("by zero")), read("")).said
    )


def test_a_failing_draw_is_reduced_to_what_it_takes(monkeypatch):
    def fake(pool, draw):
        is_wrong = draw["folds"] != "1" and draw["trains"] == "LoRA"
        return Outcome("differs" if is_wrong else "equal", draw["family"], {})

    monkeypatch.setattr(judging, "judge", fake)
    line = "family=gpt2; mesh=ring 3; data=packed; trains=LoRA; folds=3; offload=activations; clip=0.1; accumulate=2"
    draw = read(line)
    least, outcome = shrunk(Answers(), draw, fake(None, draw))
    assert least == read("trains=LoRA; folds=2") and outcome.said == "llama"
