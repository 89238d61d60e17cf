"""What a training file asks of a model is judged before any text or weight is read."""

import pytest

from ringspan.core.errors import RingspanError
from ringspan.train.job import prepare
from tests.torch.models import config
from tests.train.runs import settings


def outcome(mesh, asked):
    prepare(asked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"attention": {"route": "ulysses:4"}},
            "2 query and 2 key/value heads do not split evenly over groups of 4 ranks",
        ),
        (
            {"memory": {"folds": 2}, "kind": "glm_moe_dsa"},
            "GlmMoeDsaForCausalLM: folds=2 does not go with layers with an index",
        ),
        (
            {"model": {"compile": "nothing"}},
            "compile='nothing': use True, False or a backend of torch.compile",
        ),
        (
            {"model": {"compile": "cudagraphs"}},
            "compile='cudagraphs': a graph would repeat the messages",
        ),
        (
            {"adapter": {"rank": 2, "target_modules": "w_query"}},
            "adapter.target_modules = ['w_query']: Target modules",
        ),
        (
            {"mesh": {"tp": 2}, "adapter": {"rank": 2, "use_dora": True}},
            "tp cannot split (DoraLinearVariant)",
        ),
    ],
)
def test_it_is_refused_before_text_and_weights_are_read(pool, tmp_path, changes, says):
    changes = dict(changes)
    kind = changes.pop("kind", "llama")
    config(
        kind, **{} if kind == "glm_moe_dsa" else {"num_attention_heads": 2}
    ).save_pretrained(tmp_path)  # no weights
    model = {"path": str(tmp_path)} | changes.pop("model", {})
    data = {"paths": str(tmp_path / "no text"), "sequence_length_tokens": 64}
    for found in pool.outcomes(
        outcome, 4, settings(tmp_path, "run", model=model, data=data, **changes)
    ):
        assert isinstance(found, RingspanError) and says in str(found), found
