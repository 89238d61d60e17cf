"""The rollout function of docs/how-to/vllm.md: completions of SGLang, which reads new weights from a folder."""

from pathlib import Path
from typing import Any

from tests.docs.pages import blocks
from tests.hf.fake_vllm import serving
from tests.hf.rollouts import grpo
from tests.hf.test_vllm import trained
from tests.hf.trainers import close, history, made

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md"
PLACES = '"http://localhost:30000", "/dev/shm"'


def shown() -> str:
    """The block of the page."""
    (text,) = (
        block.text
        for block in blocks(PAGE)
        if "/update_weights_from_disk" in block.text
    )
    return text


def steps(mesh: Any, url: str, folder: str) -> Any:
    code = shown()
    assert PLACES in code
    space: dict[str, Any] = {}
    exec(code.replace(PLACES, repr((url, folder))[1:-1]), space)
    options = {"max_steps": 3, "beta": 0.0, "sampled": True}
    trainer = grpo(
        mesh, "llama", {}, folder, options | {"rollout_func": space["rollout"]}
    )
    trainer.train()
    found = history(trainer)
    found["eval_loss"] = found["loss"]  # no evaluation
    return found


def test_steps_with_sglang_equal_one_process_with_vllm(world, tmp_path):
    made("llama").save_pretrained(tmp_path / "model")
    with serving(tmp_path / "model") as server:
        expected, _ = trained(None, grpo, None, server.url, {})
        server.reload(server.folder)
        server.asked.clear()
        (tmp_path / "shared").mkdir()
        for found in world(2).run(steps, 2, server.url, str(tmp_path / "shared")):
            close(found, expected)
        assert server.asked == ["/update_weights_from_disk", "/generate"] * 3
    assert not list((tmp_path / "shared").glob("tmp*")), "folders are removed"
