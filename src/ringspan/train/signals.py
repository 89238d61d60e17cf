"""A request to stop: SIGTERM, SIGINT or SIGUSR1 set a flag, from which the ranks agree on one step that all save."""

import signal
import threading
from types import FrameType
from typing import Any, Final

from ringspan.torch.forks import STOP_SIGNALS

EXIT_STOPPED: Final = 75
"""Exit code of a run that was told to stop and has saved: sysexits' "temporary failure", start it again to go on."""


class StopRequest:
    """While it is entered, a stop signal only sets ``signal_name``; more signals change nothing.

    Outside of the main thread, where Python allows no handlers, it stays unset.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ignore_from_now_on(self) -> None:
        """Let stop signals change nothing any more, also when this has been left: all is saved, and another one could
        only take the exit code of a process that is about to end.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name
