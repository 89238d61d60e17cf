"""Stop signals: answered at once, whatever the main thread is doing, and a second interrupt aborts."""

import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from ringspan.train import signals
from ringspan.train.signals import StopRequest

ABORT = signals.ABORT_AFTER_SECONDS


@pytest.fixture
def heard(monkeypatch):
    """A request, what it says and does, and how to strike: its clock moves on when a signal is answered, only then."""
    times, events = [0.0], []

    def monotonic():
        times.append(times[-1])
        return times[-1]

    def strike(*numbers, apart=0.0):
        for number in numbers:
            count = len(times)
            os.kill(os.getpid(), number)
            while len(times) == count:  # the listener looks at the clock once a signal
                time.sleep(0.001)
            times[-1] += apart

    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=monotonic))
    return StopRequest(events.append, lambda: events.append("abort")), events, strike


SAID = "stopping after this step; press Ctrl-C again to abort"


@pytest.mark.parametrize(
    ("numbers", "apart", "expected"),
    [
        ([signal.SIGINT], 0, [SAID]),
        ([signal.SIGINT] * 3, 0.45 * ABORT, [SAID]),
        ([signal.SIGINT] * 2, ABORT, [SAID, "abort"]),
        ([signal.SIGTERM] * 3, ABORT, ["SIGTERM: stopping after this step"]),
        (
            [signal.SIGUSR1, signal.SIGTERM],
            ABORT,
            ["SIGUSR1: stopping after this step"],
        ),
        (
            [signal.SIGTERM, signal.SIGINT],
            ABORT,
            ["SIGTERM: stopping after this step", SAID],
        ),
        ([signal.SIGINT, signal.SIGTERM], ABORT, [SAID]),
    ],
)
def test_the_first_is_announced_and_a_second_interrupt_aborts(
    heard, numbers, apart, expected
):
    request, events, strike = heard
    before = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    with request:
        strike(*numbers, apart=apart)
        assert request.signal_name == signal.Signals(numbers[0]).name
    assert events == expected
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not any(thread.name == "stop signals" for thread in threading.enumerate())


def test_the_answer_does_not_wait_for_the_main_thread():
    read, write = os.pipe()
    with StopRequest(lambda line: os.write(write, b"answered")) as request:
        # C goes on after a signal, as a backward pass does
        signal.siginterrupt(signal.SIGINT, False)
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        late = threading.Timer(20, os.write, [write, b"too late"])
        late.start()
        # in which no handler runs
        ctypes.CDLL(None).read(read, said := ctypes.create_string_buffer(20), 20)
        late.cancel()
    assert said.value == b"answered" and request.signal_name == "SIGINT"
    os.close(read), os.close(write)
