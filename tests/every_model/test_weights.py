"""What was measured of weights: every type that was tried goes from files to shards and back bit for bit."""

import json

from tests.every_model.weights import RESULTS

FOUND = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_weights_of_every_type_go_there_and_back():
    others = {kind: outcome for kind, outcome in FOUND.items() if "same" not in outcome}
    # Transformers cannot open what it writes of these: their config is no longer that of a causal language model.
    assert others.keys() == {"emu3", "mllama"}, others
    assert all(outcome["refused"].startswith("not by transformers either") for outcome in others.values())
    assert len(FOUND) > 90 and all(len(outcome.get("same", "..")) >= 2 for outcome in FOUND.values())
