"""Ends all ranks when one cannot go on, in words and within seconds, wherever the others wait for it.

A rank that fails or stands still leaves its peers in a collective: for NCCL until a timeout, whose watchdog aborts
them without saying at what they were. So each rank says where it stands, and a thread looks every second whether this
rank has stood there for too long, or another has said that the run is over.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

_KEY = "adaptiveload/end"
_COLLECTIVES = "collectives_rank_"  # and the rank: as torch names its own dumps
_LOOK_EVERY_S = 1.0
# A rank that ends by itself, on the same error, may say so and close its files.
_GRACE_S = 5.0
# The process group's own timeout comes after this watch: it can only abort.
GROUP_MARGIN_S = 60.0
_MOST_KEYS = 8
_MOST_FRAMES = 8


@dataclass
class WatchConfig:
    """When a run that stands still is ended.

    Attributes:
        timeout_s: Longest time that a rank may stand at one point of a step, waiting for others or computing. More
            than `data.worker_timeout_s`, or data that does not come is called by this name; at most 1,740.
    """

    timeout_s: float = 900.0

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        most = default_pg_timeout.total_seconds() - GROUP_MARGIN_S
        if not 0 < self.timeout_s <= most:
            raise ValueError(
                f"watch.timeout_s={self.timeout_s} must be positive, and at most {most:g}: torch's own timeout of "
                "gloo's groups would come first"
            )


@dataclass(frozen=True)
class Position:
    """Where a rank stands.

    Attributes:
        what: In words.
        keys: Samples that it computes.
        is_bounded: Whether it may stand there for `watch.timeout_s` at most; not so where ranks start or evaluate.
        since: `time.monotonic()` when it came there.
    """

    what: str
    keys: Sequence[str]
    is_bounded: bool
    since: float

    def __str__(self) -> str:
        more = f" and {len(self.keys) - _MOST_KEYS} more" if len(self.keys) > _MOST_KEYS else ""
        return f"{self.what} ({', '.join(self.keys[:_MOST_KEYS])}{more})" if self.keys else self.what


class GroupWatch:
    """Watches over this rank and, through the store that the ranks met by, over the others.

    Args:
        rank: This one.
        config: See `WatchConfig`.
        run_dir: Where the last collectives are written when a rank has stood still.
    """

    def __init__(self, rank: int, config: WatchConfig, run_dir: Path) -> None:
        self.rank, self.timeout_s, self.run_dir = rank, config.timeout_s, run_dir
        self.position = Position("the start", (), False, time.monotonic())
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        # A connection of its own: the ranks' other users of the store may wait in it.
        store: Any = _get_default_store()
        while hasattr(store, "underlying_store"):  # of a prefix
            store = store.underlying_store
        self._store = store.clone()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def at(self, what: str, keys: Sequence[str] = (), *, is_bounded: bool = True) -> None:
        """Say where this rank stands from now on; see `Position`."""
        self.position = Position(what, keys, is_bounded, time.monotonic())

    def end_all(self, code: int, reason: str) -> tuple[int, str]:
        """Tell all ranks that the run is over, and stop watching.

        Returns:
            Exit code and reason, those of the rank that told first: the failure of this one may follow from that.
        """
        self.stop()
        return self._tell(code, reason)

    def stop(self) -> None:
        """Stop watching: from here on ranks may end when they like."""
        self._stopped.set()

    def _tell(self, code: int, reason: str) -> tuple[int, str]:
        try:
            told = self._store.compare_set(_KEY, "", f"{code} {reason}").decode()
        except RuntimeError:  # the process that kept the store has ended, so the others know
            return code, reason
        first_code, _, first_reason = told.partition(" ")
        return int(first_code), first_reason

    def _told(self) -> tuple[int, str] | None:
        try:
            return self._tell(0, "") if self._store.check([_KEY]) else None
        except RuntimeError as error:
            return 1, f"rank 0 or its launcher has ended, look at its output ({str(error).splitlines()[0]})"

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            position, told = self.position, self._told()
            stood_s = time.monotonic() - position.since
            if told is None and position.is_bounded and stood_s > self.timeout_s:
                reason = f"rank {self.rank} has stood still for over watch.timeout_s={self.timeout_s:g} s: {position}"
                told = self._tell(1, reason)
            if told is not None:
                self._leave(*told)

    def _leave(self, code: int, reason: str) -> None:
        """Say where this rank stands, and end it, unless it ends by itself within the time of grace."""
        position = self.position
        dumped = self._dump_collectives() if "has stood still" in reason else ""
        if self._stopped.wait(_GRACE_S):
            return
        frames = traceback.format_stack(sys._current_frames()[self._main or 0])[-_MOST_FRAMES:]
        here = f"for {time.monotonic() - position.since:.0f} s it was here: {position}{dumped}"
        print(f"train.py: rank {self.rank} ends; {here}. The reason: {reason}", file=sys.stderr)
        print("".join(frames), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)

    def _dump_collectives(self) -> str:
        from torch._C import _distributed_c10d

        dump = getattr(_distributed_c10d, "_dump_nccl_trace", None) or getattr(
            _distributed_c10d, "_dump_fr_trace", None
        )
        if dump is None:
            return ""
        with contextlib.suppress(OSError, RuntimeError):  # what it adds is not worth losing the words
            path = self.run_dir / f"{_COLLECTIVES}{self.rank}"
            path.write_bytes(dump())
            return f" (its last collectives: {path})"
        return ""


def start_recording(run_dir: Path) -> None:
    """Have torch keep the last collectives of each rank, and write them on an NCCL timeout where the watch does.

    Call it before the process group is made. What the user's environment says stays.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run_dir.absolute() / _COLLECTIVES))


def group_timeout(config: WatchConfig) -> timedelta:
    """Timeout of the process group's collectives."""
    return timedelta(seconds=config.timeout_s + GROUP_MARGIN_S)
