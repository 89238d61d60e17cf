"""The question tasks by name; each is data for one runner."""

from typing import Final

from ringspan.evaluate.task import Task
from ringspan.evaluate.tasks import aggregation, lines, needle, tracing

TASKS: Final[dict[str, Task]] = {
    task.name: task
    for task in (
        lines.TASK,
        needle.NEEDLE,
        needle.KEYS,
        needle.VALUES,
        needle.QUERIES,
        tracing.TASK,
        aggregation.COMMON_WORDS,
        aggregation.FREQUENT_WORDS,
    )
}
