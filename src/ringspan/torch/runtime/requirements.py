"""Releases of other packages that ringspan supports, read from its own metadata: pyproject.toml declares them once."""

from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


@cache
def supported(package: str) -> SpecifierSet:
    """Return the releases of a package that ringspan and all its extras support; any release if none is declared."""
    try:
        declared = [Requirement(line) for line in metadata.requires("ringspan") or ()]
    # ringspan runs from its sources, without an installation.
    except metadata.PackageNotFoundError:
        declared = []
    found = SpecifierSet()
    for each in declared:
        if canonicalize_name(each.name) == canonicalize_name(package):
            found &= each.specifier
    return found


def shown(releases: SpecifierSet) -> str:
    """Return releases as pip takes them, the lowest bound first: ``>=2.11,<2.16``."""
    return ",".join(
        sorted(map(str, releases), key=lambda bound: (bound.startswith("<"), bound))
    )


def pip_command(package: str) -> str:
    """Return the command that installs a supported release of a package."""
    return f"pip install '{package}{shown(supported(package))}'"
