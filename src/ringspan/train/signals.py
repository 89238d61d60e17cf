"""Stop requests: SIGTERM, SIGINT or SIGUSR1 set a flag, from which ranks agree on one step that all save.

A Python handler may have to wait a minute for a backward pass in C. A thread therefore receives signals at once, and
ends an aborted rank.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ringspan.torch.runtime.forks import ABORT_AFTER_SECONDS, STOP_SIGNALS

EXIT_STOPPED: Final = 75
"""Exit code of a run that was stopped and has saved: sysexits' "temporary failure"; start it again to resume."""
# exit code of a rank that was interrupted again and did not finish its step
EXIT_ABORTED: Final = 130


class StopRequest:
    """Context in which a stop signal only sets ``signal_name`` and calls ``announce`` at once, once.

    A second SIGINT aborts, if clearly later than the first, which terminal and launcher both send. Repeats of others
    change nothing; nor does anything outside the main thread, where Python allows no handlers.
    """

    def __init__(
        self,
        announce: Callable[[str], None] = lambda line: None,
        abort: Callable[[], None] = lambda: os._exit(EXIT_ABORTED),
    ) -> None:
        self.signal_name: str | None = None
        self._announce, self._abort = announce, abort
        self._previous: dict[signal.Signals, Any] = {}
        self._was_told = False
        self._interrupted: float | None = None  # when SIGINT came first
        self._listener: threading.Thread | None = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._inbox, self._outbox = os.pipe()
            os.set_blocking(self._outbox, False)
            self._before = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
            self._listener = threading.Thread(
                target=self._listen, name="stop signals", daemon=True
            )
            self._listener.start()
            self._previous = {
                number: signal.signal(number, self._receive) for number in STOP_SIGNALS
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._listener is not None:
            signal.set_wakeup_fd(self._before)
            os.close(self._outbox)  # the listener reads to the end
            self._listener.join()
            os.close(self._inbox)
            self._listener = None

    def ignore_from_now_on(self) -> None:
        """Ignore stop signals for good: all is saved, and one could only change the exit code."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name

    def _listen(self) -> None:
        """Read the signal numbers that Python's C part writes, a byte each; runs in its own thread."""
        while numbers := os.read(self._inbox, 64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._answer(signal.Signals(number))

    def _answer(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._interrupted is not None:
            if now - self._interrupted >= ABORT_AFTER_SECONDS:
                self._abort()
            return
        if number == signal.SIGINT:
            self._interrupted = now
            self._announce("stopping after this step; press Ctrl-C again to abort")
        elif not self._was_told:
            self._announce(f"{number.name}: stopping after this step")
        self._was_told = True
