"""A trainer on a ring whose ranks compute in folds."""

from tests.hf.trainers import close, plain, train


def test_a_trainer_in_folds_is_itself_in_one_pass(world):
    expected = train(None, plain, "llama", None, {"max_steps": 3})
    for found in world(2).run(train, 2, plain, "llama", {"folds": 3}, {"max_steps": 3}):
        close(found, expected)
