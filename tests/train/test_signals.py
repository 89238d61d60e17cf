"""Stop signals: answered at once, whatever the main thread is doing, and a second interrupt aborts."""

import hashlib
import os
import signal
import threading
import time

import pytest

from ringspan.train import signals
from ringspan.train.signals import StopRequest


@pytest.fixture
def heard(monkeypatch):
    """What a request says and does, with the moment; a tenth of a second makes a second interrupt."""
    monkeypatch.setattr(signals, "ABORT_AFTER_SECONDS", 0.1)
    events = []
    request = StopRequest(
        lambda line: events.append((time.monotonic(), line)), lambda: events.append((time.monotonic(), "abort"))
    )
    return request, events


def strike(*numbers, apart=0.0):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(apart)


def settled(events, count):
    deadline = time.monotonic() + 5
    while len(events) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return [line for _, line in events]


SAID = "stopping after this step; press Ctrl-C again to abort"


@pytest.mark.parametrize(
    ("numbers", "apart", "expected"),
    [
        ([signal.SIGINT], 0, [SAID]),
        ([signal.SIGINT] * 3, 0, [SAID]),
        ([signal.SIGINT] * 2, 0.15, [SAID, "abort"]),
        ([signal.SIGTERM] * 3, 0.15, ["SIGTERM: stopping after this step"]),
        ([signal.SIGUSR1, signal.SIGTERM], 0.15, ["SIGUSR1: stopping after this step"]),
        ([signal.SIGTERM, signal.SIGINT], 0.15, ["SIGTERM: stopping after this step", SAID]),
        ([signal.SIGINT, signal.SIGTERM], 0.15, [SAID]),
    ],
)
def test_the_first_is_announced_and_a_second_interrupt_aborts(heard, numbers, apart, expected):
    request, events = heard
    before = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    with request:
        strike(*numbers, apart=apart)
        assert settled(events, len(expected)) == expected
        assert request.signal_name == signal.Signals(numbers[0]).name
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not any(thread.name == "stop signals" for thread in threading.enumerate())


def test_the_answer_does_not_wait_for_the_main_thread(heard):
    request, events = heard
    with request:
        threading.Timer(0.1, strike, [signal.SIGINT]).start()
        hashlib.pbkdf2_hmac("sha256", b"a backward pass", b"", 2_000_000)  # one call, in which no handler runs
        ended = time.monotonic()
    assert [line for _, line in events] == [SAID]
    assert events[0][0] < ended
