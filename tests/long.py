"""What takes long: ``make long`` runs it, ``make test`` does not."""

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Cases of a parametrized test of which ``make test`` tries others."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
