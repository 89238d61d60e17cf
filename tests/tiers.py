"""The three steps of `make test`, and which test file belongs to which.

A is what one process computes: no pool of ranks, and no framework of models at import, so that it starts in seconds.
B is what starts ranks or takes a model. C waits for processes by the clock and must run alone: the tests marked
`alone`. A file says by its imports which of A and B it is; nothing lists them.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# What takes seconds to import, in each worker.
HEAVY: Final = frozenset(
    {
        "accelerate",
        "datasets",
        "flax",
        "jax",
        "lightning",
        "lm_eval",
        "peft",
        "transformers",
        "trl",
        "diffusers",
    }
)


def tier(path: Path) -> str:
    """Return "a" or "b": the step that runs the test file."""
    return "b" if _imports_heavy(path, frozenset()) or _takes(path, "pool") else "a"


def group(test: str) -> str:
    """Return what the test, named as pytest does, shares with others, for which one worker runs them all: ranks, or its
    file alone.
    """
    file, _, name = test.partition("::")
    path, function = ROOT / file, name.partition("[")[0]
    return next(
        (ranks for ranks in ("world", "pool") if function in _takers(path, ranks)), file
    )


def _takes(path: Path, fixture: str) -> bool:
    return bool(_takers(path, fixture))


@functools.cache
def _takers(path: Path, fixture: str) -> set[str]:
    """Return the functions of the file that take the fixture, or one of the file that does."""
    functions = [
        node for node in ast.walk(_parsed(path)) if isinstance(node, ast.FunctionDef)
    ]
    takers, last = {fixture}, set[str]()
    while takers != last:
        last = takers
        takers = takers | {
            each.name
            for each in functions
            if takers & {argument.arg for argument in each.args.args}
        }
    return takers - {fixture}


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


_judged: dict[Path, bool] = {}


def _imports_heavy(path: Path, above: frozenset[Path]) -> bool:
    """True if importing the file imports a heavy package, by whatever of ours it imports."""
    if path not in _judged and path not in above:
        names = list(_imported(path))
        ours = {file for name in names for file in _files(name)}
        heavy = any(name.partition(".")[0] in HEAVY for name in names)
        _judged[path] = heavy or any(
            _imports_heavy(file, above | {path}) for file in ours
        )
    return _judged.get(path, False)


def _imported(path: Path) -> Iterator[str]:
    """Dotted names of the imports that run when the file is imported: not those of functions or for types only."""
    todo: list[ast.stmt] = list(_parsed(path).body)
    while todo:
        match todo.pop():
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.If(test=test, body=body, orelse=orelse):
                todo += orelse if is_type_checking(test) else body + orelse
            case ast.Try(body=body) | ast.With(body=body):
                todo += body


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _files(name: str) -> Iterator[Path]:
    """Yield the files of ours that importing the name runs: its packages' and its own."""
    parts = name.split(".")
    base = {
        "ringspan": ROOT / "src",
        "tests": ROOT,
        "benchmarks": ROOT,
        "examples": ROOT,
    }.get(parts[0])
    if base is None:
        return
    for end in range(1, len(parts) + 1):
        path = base.joinpath(*parts[:end])
        yield from filter(Path.is_file, (path / "__init__.py", path.with_suffix(".py")))
