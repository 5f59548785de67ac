"""Signals that ask a run to end soon: remembered until a step's border, where all ranks save and end together."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# A rank that was asked to end has saved and can go on: start the run again. 1 is a failure, 128 + n a fatal signal.
STOPPED_EXIT_CODE = 85
# Memory did not suffice; the run has written down a lower limit, and goes on under it when started again.
LOWER_LIMIT_EXIT_CODE = 86


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


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Processes that are started meanwhile never see the signals; this one sees them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
