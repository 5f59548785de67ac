"""Signals that ask a run to end: at a step's border, where all ranks save and end together, or, by Ctrl-C, at once."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# A rank that was asked to end has saved and can go on: start the run again. 1 is a failure, 128 + n a fatal signal.
STOPPED_EXIT_CODE = 85
# Memory did not suffice; the run has written down a lower limit, and goes on under it when started again.
LOWER_LIMIT_EXIT_CODE = 86
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT


class StopSignals:
    """The last of `STOP_SIGNALS` that came to this process.

    Attributes:
        received: Number of the signal, 0 for none.
    """

    def __init__(self) -> None:
        self.received = 0

    def catch(self) -> None:
        """From now on remember them; also those that came before, if the launcher blocked them."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = number


def end_at_interrupt(last_words: str | None) -> None:
    """From now on Ctrl-C ends this process at once with `INTERRUPTED_EXIT_CODE` and one line, None for none.

    A thread does it: the main one may wait for ranks that have ended already, and would never come back from there.
    """
    ours, woken = socket.socketpair()
    for end in (ours, woken):
        end.setblocking(end is ours)
    signal.signal(signal.SIGINT, lambda *_: None)  # what counts is that Python writes its number to `woken`
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        with woken:
            while signal.SIGINT not in ours.recv(64):
                pass
            if last_words is not None:
                os.write(2, f"\n{last_words}\n".encode())
            os._exit(INTERRUPTED_EXIT_CODE)

    threading.Thread(target=wait, name="interrupt", daemon=True).start()


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Processes that are started meanwhile never see the signals, nor Ctrl-C; this one sees them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
