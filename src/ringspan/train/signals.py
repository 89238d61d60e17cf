"""A request to stop: SIGTERM, SIGINT or SIGUSR1 set a flag, from which the ranks agree on one step that all save.

Python calls a handler when the main thread is back from what it is doing, which may be a minute of a backward pass. So
a thread is told of each signal too: it answers at once, and it ends a rank that is asked to abort.
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
"""Exit code of a run that was told to stop and has saved: sysexits' "temporary failure", start it again to go on."""
EXIT_ABORTED: Final = 130
"""Exit code of a rank that was interrupted again, and did not wait for the end of its step."""


class StopRequest:
    """While it is entered, a stop signal only sets ``signal_name``, and ``announce`` is told so at once, once.

    A second SIGINT aborts the process; it has to come so much after the first that it is not the same one, which a
    terminal sends to all processes and a launcher passes on to its ranks. More of the other signals change nothing.
    Outside of the main thread, where Python allows no handlers, all stays as it is.
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
            self._listener = threading.Thread(target=self._listen, name="stop signals", daemon=True)
            self._listener.start()
            self._previous = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
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
        """Let stop signals change nothing any more, also when this has been left: all is saved, and another one could
        only take the exit code of a process that is about to end.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name

    def _listen(self) -> None:
        """In a thread of its own: what the C part of Python writes of each signal, a byte with its number."""
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
