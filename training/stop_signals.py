"""Signals that ask a run to end: at a step's border, where all ranks save and end together, or, by Ctrl-C, at once."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# A rank that was asked to end has saved and can go on: start the run again. 1 is a failure, 128 + n a fatal signal.
STOPPED_EXIT_CODE = 85
# Memory did not suffice; the run has written down a lower limit, and goes on under it when started again.
LOWER_LIMIT_EXIT_CODE = 86
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
# One signal may reach a rank twice at once: from the scheduler, and from the launcher that passes it on.
REPEATED_AFTER_S = 5.0


class StopSignals:
    """The last of `STOP_SIGNALS` that came to this process.

    Args:
        clock: Seconds.

    Attributes:
        received: Number of the signal, 0 for none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received = 0
        self._clock = clock
        self._first: dict[int, float] = {}

    def catch(self) -> None:
        """From now on remember them; also those that came before, if the launcher blocked them."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def is_repeated(self, number: int) -> bool:
        """Whether this signal, which has just come, is a second one of its kind: the user will not wait any longer."""
        if number not in STOP_SIGNALS:
            return False
        now = self._clock()
        return now - self._first.setdefault(number, now) >= REPEATED_AFTER_S

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = number


def end_at_signals(last_words: str | None, stop: StopSignals) -> None:
    """From now on Ctrl-C ends this process at once with `INTERRUPTED_EXIT_CODE` and one line, None for none.

    So does a signal that `stop` catches, once it is repeated, with 128 + its number.
    A thread does it: the main one may wait for ranks that have ended already, and would never come back from there.
    """
    ours, woken = socket.socketpair()
    for end in (ours, woken):
        end.setblocking(end is ours)
    signal.signal(signal.SIGINT, lambda *_: None)  # what counts is that Python writes its number to `woken`
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        with woken:
            while True:
                for number in ours.recv(64):
                    if number == signal.SIGINT:
                        _end(INTERRUPTED_EXIT_CODE, last_words and f"\n{last_words}")
                    if stop.is_repeated(number):
                        rank, name = os.environ.get("RANK", "0"), signal.Signals(number).name
                        what = f"{name} came again, rank {rank} ends at once: a save under way is given up"
                        _end(128 + number, f"train.py: {what}, the last committed checkpoint is good")

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _end(code: int, last_words: str | None) -> None:
    try:
        if last_words is not None:
            os.write(2, f"{last_words}\n".encode())
    finally:
        os._exit(code)


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Processes that are started meanwhile never see the signals, nor Ctrl-C; this one sees them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
