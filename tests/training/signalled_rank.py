"""A rank that signals are sent to: one that does not catch them, or one that waits where Python does not come back.

signalled_rank.py started | caught
"""

import ctypes
import sys
import threading

from adaptiveload.training.stop_signals import StopSignals, end_at_signals


def start_without_catching() -> None:
    """What each script does that is launched, and then whatever it does."""
    from adaptiveload.training.distributed import start_ranks

    start_ranks()
    print("started", flush=True)
    threading.Event().wait()


def catch_and_wait() -> None:
    """Catches signals, by a clock of its own; says when each was looked at."""
    times = iter((100.0, 101.0, 104.9, 105.0))

    def clock() -> float:
        now = next(times)
        print(now, flush=True)
        return now

    stop = StopSignals(clock)
    end_at_signals(None, stop)
    stop.catch()
    print("started", flush=True)
    # As in a collective: no signal ends this wait, and no handler of Python runs.
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


if __name__ == "__main__":
    {"started": start_without_catching, "caught": catch_and_wait}[sys.argv[1]]()
