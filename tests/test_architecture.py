"""The tree is the architecture, floor by floor: cli -> train -> ... -> {torch, jax} -> gpu -> core.

Imports are read from the source, never executed, so a folder is checked whether or not its framework is installed.
"""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringspan
from tests.tiers import is_type_checking

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "ringspan"
# The public surface: __init__.py, __main__.py and whatever else lies directly in the package's folder.
FACADE = "the facade"

# From the lowest floor up: a folder may import those on floors below its own.
FLOORS = (
    {"core"},
    {"gpu"},
    {"torch", "jax"},
    {"checkpoints", "plan", "families"},
    {"proof"},
    {"measure", "generate", "hf", "lightning"},
    {"report", "evaluate"},
    {"train"},
    {"cli"},
)
ALLOWED = {
    name: set[str]().union(*FLOORS[:floor])
    for floor, names in enumerate(FLOORS)
    for name in names
}
ALLOWED["cli"] |= {FACADE}
ALLOWED[FACADE] = set[str]().union(*FLOORS)
# A back end does not reach for the other one's framework either, and what both launch for neither.
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
FOREIGN = {"torch": JAX, "jax": {"torch"}, "gpu": {"torch"} | JAX}
CORE_MAY_USE = sys.stdlib_module_names | {"numpy"}


def is_import_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else getattr(node.func, "id", None)
    )
    return name in {"import_module", "__import__"}


def absolute(level: int, name: str, package: tuple[str, ...]) -> str:
    """`name` after `level` leading dots, seen from `package`; ImportError where the dots leave the top package."""
    if level == 0:
        return name
    if level > len(package):
        raise ImportError(f"{'.' * level}{name} leaves the package")
    return ".".join([*package[: len(package) - level + 1], *filter(None, [name])])


def imports(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import under `node`, in functions too, but for TYPE_CHECKING blocks.

    `from a import b` gives `a.b`, whether b is a module or a name in one.
    """
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(node.level, node.module or "", package)
        yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Call) and is_import_call(node) and node.args:
        match node.args[0]:
            case ast.Constant(value=str(name)):
                bare = name.lstrip(".")
                yield node.lineno, absolute(len(name) - len(bare), bare, package)
    guarded = isinstance(node, ast.If) and is_type_checking(node.test)
    children = node.orelse if guarded else ast.iter_child_nodes(node)
    for child in children:
        yield from imports(child, package)


def folder_of(module: str, folders: set[str]) -> str:
    """The folder of our package in which `ringspan.x.y` lies."""
    second = module.split(".")[1:2]
    return second[0] if second and second[0] in folders else FACADE


def room_of(root: Path, module: str) -> str:
    """The innermost folder that a module is in, below the package; files beside folders are rooms of their own."""
    path = root.joinpath(*module.split(".")[1:])
    while path != root and not path.is_dir():
        is_beside_folders = path.with_suffix(".py").is_file() and any(
            p.is_dir() for p in path.parent.glob("[a-z]*")
        )
        if is_beside_folders and path.parent != root:
            break
        path = path.parent
    return path.relative_to(root).as_posix()


def violations(root: Path) -> list[str]:
    """Every import under `root` (a folder named ringspan) that goes against the arrows, as `file:line: what`."""
    folders = {
        path.name
        for path in root.iterdir()
        if path.is_dir() and any(path.rglob("*.py"))
    }
    found = [
        f"{name}/: not a folder of the design"
        for name in sorted(folders - set(ALLOWED))
    ]
    uses: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root.parent)
        folder = folder_of(".".join(relative.parent.parts), folders)
        if folder not in ALLOWED:
            continue
        for line, name in imports(
            ast.parse(path.read_text(encoding="utf-8")), relative.parent.parts
        ):
            top = name.split(".")[0]
            target = folder_of(name, folders | set(ALLOWED)) if top == PACKAGE else None
            if target is None:
                foreign = (
                    folder == "core" and top not in CORE_MAY_USE
                ) or top in FOREIGN.get(folder, set())
                if foreign:
                    found.append(
                        f"{relative.as_posix()}:{line}: {folder} imports {top}"
                    )
            elif target != folder and target not in ALLOWED[folder]:
                found.append(
                    f"{relative.as_posix()}:{line}: {folder} imports {target} ({name})"
                )
            room, other = (
                room_of(root, ".".join(relative.with_suffix("").parts)),
                room_of(root, name),
            )
            if target is not None and FACADE not in (folder, target) and room != other:
                uses.setdefault(room, set()).add(other)
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        found.append(f"cycle: {' -> '.join(reversed(error.args[1]))}")
    return found


# The halls of torch, from the lowest up, and below them the files beside them. A mechanism that is young may change in
# any release: it imports the base, and nothing but the list of all imports it.
HALLS = ("runtime", "engine", "data", "model", "mechanisms", "generate")
YOUNG = ("chosen_keys", "folds", "trees")


def imported_in_torch() -> Iterator[tuple[str, int, str]]:
    """(file below torch, line, imported name below torch) of every import of torch by itself."""
    root = SOURCE / PACKAGE / "torch"
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imports(tree, relative.parent.parts):
            if name.startswith(f"{PACKAGE}.torch."):
                below = name.removeprefix(f"{PACKAGE}.torch.")
                yield path.relative_to(root).as_posix(), line, below


def test_the_halls_of_torch_import_those_below():
    floors = {name: floor for floor, name in enumerate(HALLS)}
    found = [*imported_in_torch()]
    assert len(found) > 1000
    wrong = [
        f"{file}:{line} imports {name}"
        for file, line, name in found
        if floors.get(name.split(".")[0], 99) > floors.get(file.split("/")[0], 99)
        or (file.split("/")[0] in floors and name.split(".")[0] not in floors)
    ]
    assert wrong == []


def test_the_base_imports_no_young_mechanism():
    young = tuple(f"mechanisms.{name}." for name in YOUNG)
    wrong = [
        f"{file}:{line} imports {name}"
        for file, line, name in imported_in_torch()
        if name.startswith(young)
        and file != "mechanisms/every.py"
        and file.split("/")[:2] != name.split(".")[:2]
    ]
    assert wrong == []


def write_tree(parent: Path, files: dict[str, str]) -> Path:
    root = parent / PACKAGE
    for name in (
        "__init__.py",
        "core/__init__.py",
        "torch/__init__.py",
        "jax/__init__.py",
    ):
        files = {name: "", **files}
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


def test_the_arrows_hold():
    root = SOURCE / PACKAGE
    assert list(root.rglob("*.py")), f"no source under {root}"
    assert violations(root) == []


@pytest.mark.parametrize(
    ("file", "source", "reported"),
    [
        ("core/tile.py", "import torch\n", ":1: core imports torch"),
        (
            "core/tile.py",
            "from transformers import AutoModel\n",
            ":1: core imports transformers",
        ),
        (
            "core/tile.py",
            "def f():\n    import jax.numpy as jnp\n",
            ":2: core imports jax",
        ),
        (
            "core/tile.py",
            "import ringspan.torch.ring\n",
            ":1: core imports torch (ringspan.torch.ring)",
        ),
        (
            "core/tile.py",
            "from ringspan import torch\n",
            ":1: core imports torch (ringspan.torch)",
        ),
        (
            "core/tile.py",
            "from .. import plan\n",
            ":1: core imports plan (ringspan.plan)",
        ),
        (
            "core/tile.py",
            "from ringspan import causal\n",
            ":1: core imports the facade (ringspan.causal)",
        ),
        (
            "core/__init__.py",
            "from ..torch import ring\n",
            ":1: core imports torch (ringspan.torch.ring)",
        ),
        (
            "torch/kernels/cpu.py",
            "from ...jax.ring import f\n",
            ":1: torch imports jax (ringspan.jax.ring.f)",
        ),
        ("torch/ring.py", "import jax\n", ":1: torch imports jax"),
        ("gpu/attention.py", "import torch\n", ":1: gpu imports torch"),
        (
            "gpu/attention.py",
            "from ..torch import ring\n",
            ":1: gpu imports torch (ringspan.torch.ring)",
        ),
        (
            "jax/ring.py",
            "try:\n    import torch\nexcept ImportError:\n    pass\n",
            ":2: jax imports torch",
        ),
        (
            "jax/ring.py",
            "def f():\n    from ..torch import ring\n",
            ":2: jax imports torch (ringspan.torch.ring)",
        ),
        (
            "torch/mesh.py",
            "from ringspan.train.loop import f\n",
            ":1: torch imports train (ringspan.train.loop.f)",
        ),
        (
            "plan/cost.py",
            "from ..cli.main import main\n",
            ":1: plan imports cli (ringspan.cli.main.main)",
        ),
        (
            "hf/loop.py",
            "from ..train import loop\n",
            ":1: hf imports train (ringspan.train.loop)",
        ),
        (
            "core/tile.py",
            "import importlib\nimportlib.import_module('torch')\n",
            ":2: core imports torch",
        ),
        (
            "torch/ring.py",
            "m = __import__('ringspan.jax.ring')\n",
            ":1: torch imports jax (ringspan.jax.ring)",
        ),
        (
            "core/tile.py",
            "if TYPE_CHECKING:\n    pass\nelse:\n    import torch\n",
            ":4: core imports torch",
        ),
    ],
)
def test_the_checker_reports_a_violation(
    tmp_path: Path, file: str, source: str, reported: str
):
    root = write_tree(tmp_path, {file: source})
    assert violations(root) == [f"{PACKAGE}/{file}{reported}"]


def test_the_checker_reports_a_cycle_and_an_unknown_folder(tmp_path: Path):
    root = write_tree(
        tmp_path,
        {
            "train/data/order.py": "from ..config import tables\n",
            "train/config/tables.py": "from ringspan.train.data import order\n",
            "utils/misc.py": "",
        },
    )
    unknown, cycle = violations(root)
    assert unknown == "utils/: not a folder of the design"
    assert (
        cycle.startswith("cycle: ")
        and "train/data" in cycle
        and "train/config" in cycle
    )


MAY_REPLACE = {
    "measure/trace/torch_seams.py": "a dry run has no devices",
    "torch/runtime/foreign_mesh.py": "torch counts groups that only some ranks make, and takes the count back nowhere",
}


def replacements(source: str) -> list[int]:
    """Lines that give an attribute of what was imported, or of a class of the module, a value, or import mocks."""
    tree = ast.parse(source)
    found: list[int] = []
    foreign = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            foreign |= {
                (alias.asname or alias.name).split(".")[0] for alias in node.names
            }
            names = [
                getattr(node, "module", None) or "",
                *(alias.name for alias in node.names),
            ]
            found += (
                [node.lineno]
                if any("unittest" in name or name == "mock" for name in names)
                else []
            )

    def is_foreign(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in foreign

    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and not isinstance(node.ctx, ast.Load)
            and is_foreign(node.value)
        ):
            found.append(node.lineno)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
        ):
            found += [node.lineno] if is_foreign(node.args[0]) else []
    return sorted(set(found))


def test_only_seams_that_torch_lacks_are_replaced():
    files = {
        path.relative_to(SOURCE / PACKAGE).as_posix(): path
        for path in SOURCE.rglob("*.py")
    }
    found = {
        name: replacements(path.read_text(encoding="utf-8"))
        for name, path in files.items()
    }
    assert {name for name, lines in found.items() if lines} == set(MAY_REPLACE), found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("from ringspan.torch import kernels\nkernels.choose = None\n", [2]),
        ("import torch\ndef f():\n    torch.cuda.x, y = 1, 2\n", [3]),
        ("from torch import Tensor as T\nT.add = T.sub\ndel T.mul\n", [2, 3]),
        ("def f():\n    import torch\n    setattr(torch, 'x', 1)\n", [3]),
        ("class A:\n    x = 1\nA.x += 1\n", [3]),
        ("from unittest.mock import patch\n", [1]),
        ("from unittest import mock\n", [1]),
        (
            "import torch\nx = torch.nn\nclass A:\n    def f(self):\n        self.x = f(torch).z = 1\n",
            [],
        ),
    ],
)
def test_a_replacement_is_found(source: str, lines: list[int]):
    assert replacements(source) == lines


# Each takes a module out of the table of all modules, where a replacement would not be seen above.
TAKES_MODULES = {
    "hf/rollouts.py": "TRL gathers by names in its modules",
    "plan/model/hub.py": "the Hub's clients read HF_HUB_OFFLINE when they are imported",
    # These read only, what is loaded already or not at all.
    "hf/seams.py": "looks for names that a release no longer has",
    "proof/float64.py": "the source of a model's class, computed in float64",
    "torch/model/adapters.py": "PEFT",
    "torch/model/merged.py": "PEFT, and the module of a model's class",
    "torch/runtime/forks.py": "torch",
}


def takes_modules(source: str) -> bool:
    """Whether it indexes ``sys.modules``, or asks it for a module."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "modules"
        and getattr(node.value, "id", None) == "sys"
        for parent in ast.walk(ast.parse(source))
        if isinstance(parent, ast.Subscript | ast.Attribute)
        for node in [parent.value]
    )


def test_modules_are_looked_up_only_where_explained():
    files = {
        path.relative_to(SOURCE / PACKAGE).as_posix(): path
        for path in SOURCE.rglob("*.py")
    }
    found = {
        name
        for name, path in files.items()
        if takes_modules(path.read_text(encoding="utf-8"))
    }
    assert found == set(TAKES_MODULES)


LOADED = """
import sys
before = {name.split(".")[0] for name in sys.modules}
import ringspan
outside = {name.split(".")[0] for name in sys.modules if not name.startswith("_")} - sys.stdlib_module_names
print(*sorted(outside - before))
import ringspan.torch.runtime.forks, ringspan.train.config.tables
# That is all that a launcher needs before its ranks get ready.
print(ringspan.__file__, *{"torch", "jax", "transformers"} & set(sys.modules), sep="\\n")
"""


def test_importing_ringspan_loads_no_framework():
    run = subprocess.run(
        [sys.executable, "-c", LOADED],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    outside, file, *frameworks = run.stdout.splitlines()
    assert outside == PACKAGE, "import ringspan loads more than the standard library"
    assert [file, *frameworks] == [str(SOURCE / PACKAGE / "__init__.py")]


def test_every_public_name_is_found_where_the_table_says():
    source = ast.parse((SOURCE / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (guarded,) = (
        node
        for node in source.body
        if isinstance(node, ast.If) and is_type_checking(node.test)
    )
    for_checkers = {
        name for statement in guarded.body for _, name in imports(statement, (PACKAGE,))
    }
    # Read from the module, so that the table, the imports of type checkers and __all__ cannot part.
    assert for_checkers == {
        f"{module}.{name}" for name, module in ringspan._MODULES.items()
    }
    assert ringspan.__all__ == sorted(ringspan._MODULES)
    assert {*ringspan.__all__, "__version__"} <= set(dir(ringspan))
    assert all(
        getattr(ringspan, name).__module__ == module
        for name, module in ringspan._MODULES.items()
    )
    with pytest.raises(AttributeError, match="has no attribute 'ring'"):
        ringspan.ring  # noqa: B018
