"""Python imports this first in each process that a judged test starts, so that ranks have the mutant's code too."""

from tests.mutants.change import change_as_parent

change_as_parent()
