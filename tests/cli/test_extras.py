"""Without what an extra brings: one line for the command that needs it, code 2, and all others work."""

import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ringspan.core.errors import MissingExtraError
from ringspan.core.messages.extras import EXTRAS, installed, require
from tests.cases import long
from tests.surface import OBJECTS, check_object
from tests.train.runs import training_file

SOURCE = Path(__file__).parents[2] / "src"
# Read by every Python that starts with it, hence by ranks and by the process that they are forks of.
BLOCK = (
    "import os, sys\nsys.modules.update(dict.fromkeys(os.environ['BLOCKED'].split()))\n"
)


@pytest.fixture
def ringspan(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCK)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n" * 400
    )
    (tmp_path / "config.toml").write_text(training_file(tmp_path))

    def run(without, *arguments):
        path = os.pathsep.join([str(tmp_path / "site"), str(SOURCE)])
        return subprocess.run(
            [sys.executable, "-m", "ringspan", *arguments],
            env={**os.environ, "PYTHONPATH": path, "BLOCKED": without},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


REPORT = "needs the extra ringspan[report]: pip install '.[report]' in a checkout of ringspan"
EVAL = "needs the extra ringspan[eval]: pip install '.[eval]' in a checkout of ringspan"
TRAIN = (
    "needs the extra ringspan[train]: pip install '.[train]' in a checkout of ringspan"
)
TRACE = (
    "plan",
    "--model",
    "qwen3-0.6b",
    "--devices",
    "1",
    "--length",
    "64",
    "--trace",
    "--picture",
    "plan.svg",
)


@pytest.mark.parametrize(
    ("without", "arguments", "line"),
    [
        ("matplotlib", ["profile"], f"ringspan profile {REPORT}"),
        *long(
            ("matplotlib", TRACE, f"--picture plan.svg {REPORT}"),
            (
                "matplotlib",
                ["train", "config.toml", "profile=true", "steps=3"],
                f"profile = true {REPORT}",
            ),
        ),
        ("datasets", ["train", "config.toml"], f"training {TRAIN}"),
        *long(
            ("datasets", ["demo"], f"ringspan demo {TRAIN}"),
            (
                "lm_eval",
                ["eval", "harness", "model", "--tasks", "arc_easy"],
                f"ringspan eval harness {EVAL}",
            ),
        ),
    ],
)
def test_a_command_names_a_missing_extra_before_anything_starts(
    ringspan, tmp_path, without, arguments, line
):
    before = sorted(tmp_path.rglob("*"))
    done = ringspan(without, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ringspan: {line}\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        OBJECTS["plan"],
        *long(["init", "new.toml"], OBJECTS["bench attention"]),
    ],
)
def test_the_other_commands_work(ringspan, arguments):
    done = ringspan(" ".join(EXTRAS), *arguments)
    assert done.returncode == 0, done.stderr
    if "--json" in arguments:
        check_object(
            " ".join(arguments[:2]) if arguments[0] == "bench" else arguments[0],
            json.loads(done.stdout),
        )


@pytest.mark.long
def test_modules_import_without_extras_except_text_readers(ringspan, tmp_path):
    """The data of a training run, and what stands on it; of the rest, whatever imports an extra does it where it is
    used."""
    root = SOURCE / "ringspan"
    names = [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in sorted(root.rglob("*.py"))
    ]
    of_lm_eval = "ringspan.evaluate.harness.lm", "ringspan.evaluate.harness.run"
    asking = ("ringspan.jax", "ringspan.hf", "ringspan.lightning", *of_lm_eval)
    skipped = (
        *asking,
        "ringspan.gpu",
        "ringspan.torch.engine.kernels.local.triton_",
        "ringspan.__main__",
    )
    modules = [
        name.removesuffix(".__init__") for name in names if not name.startswith(skipped)
    ]
    (tmp_path / "ringspan_imports.py").write_text(
        "import importlib, json, sys\nfrom ringspan.core.errors import MissingExtraError\nmissing = []\n"
        f"for name in {modules!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except MissingExtraError as error: missing.append((name, str(error)))\n"
        "print(json.dumps(missing))\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), str(SOURCE)])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "ringspan_imports.py")],
        env={**os.environ, "PYTHONPATH": path, "BLOCKED": " ".join(EXTRAS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(done.stdout))
    assert set(found.values()) == {f"training {TRAIN}"}
    folder = "ringspan.train.data"
    users = {"job", "loop", "model", "run_folder.export", "run_folder.resume"}
    assert {name for name in found if not name.startswith(folder)} == {
        *(f"ringspan.train.{name}" for name in users),
        "ringspan.cli.progress",
    }


@pytest.mark.long
def test_a_run_without_tensorboard_notes_it_once(ringspan, tmp_path):
    done = ringspan("tensorboard", "train", "config.toml", "--nproc", "2", "steps=2")
    assert done.returncode == 0, done.stderr
    line = "metrics.jsonl is written, TensorBoard files are not: they need the extra ringspan[train]"
    assert done.stderr.count(line) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "package_of_no_one").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("package_of_no_one")
    assert installed("json")


@pytest.mark.parametrize(
    ("module", "package"),
    [("jax", "jax"), ("hf", "accelerate"), ("lightning", "lightning")],
)
def test_a_part_that_needs_an_extra_asks_for_it(monkeypatch, module, package):
    part = f"ringspan.{module}"
    for name in [
        name for name in sys.modules if name == part or name.startswith(f"{part}.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf"ringspan\.{module} needs the extra ringspan\[{module}\]"
    ):
        importlib.import_module(part)


def test_a_missing_extra_is_a_refusal_that_travels_between_ranks(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError) as raised:
        require("a picture", "matplotlib")
    assert (
        isinstance(raised.value, ImportError)
        and str(raised.value) == f"a picture {REPORT}"
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
