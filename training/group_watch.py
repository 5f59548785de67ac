"""Ends all ranks when one cannot go on, in words and within seconds, wherever the others wait for it.

A rank that fails or stands still leaves its peers in a collective: for NCCL until a timeout, whose watchdog aborts
them without saying at what they were. So each rank says where it stands. Every second one thread looks whether this
rank has stood there for too long, another whether a rank has said that the run is over: that one asks the store, which
does not answer once the node that keeps it has lost its power.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T")

_KEY = "adaptiveload/end"
_COLLECTIVES = "collectives_rank_"  # and the rank: as torch names its own dumps
_LOOK_EVERY_S = 1.0
# A rank that ends by itself, on the same error, may say so and close its files.
_GRACE_S = 5.0
# Longest wait for what may never answer: the store, the disk, who reads the output.
_ANSWER_S = 3.0
# That of a rank that fails, for the store alone, which may only be slow: without its answer the rank would end with a
# code of its own, where that of the first to fail has the run started again.
_LAST_ANSWER_S = 10.0
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
        self._leaving = threading.Lock()
        # A connection of its own: the ranks' other users of the store may wait in it.
        store: Any = _get_default_store()
        while hasattr(store, "underlying_store"):  # of a prefix
            store = store.underlying_store
        self._store = store.clone()
        for look in (self._stands_still, self._told):
            threading.Thread(target=self._watch, args=(look,), name="watch", daemon=True).start()

    def at(self, what: str, keys: Sequence[str] = (), *, is_bounded: bool = True) -> None:
        """Say where this rank stands from now on; see `Position`."""
        self.position = Position(what, keys, is_bounded, time.monotonic())

    def end_all(self, code: int, reason: str) -> tuple[int, str]:
        """Tell all ranks that the run is over, and stop watching.

        Returns:
            Exit code and reason, those of the rank that told first: the failure of this one may follow from that.
        """
        self.stop()
        return self._tell(code, reason, _LAST_ANSWER_S)

    def stop(self) -> None:
        """Stop watching: from here on ranks may end when they like."""
        self._stopped.set()

    def _tell(self, code: int, reason: str, answer_s: float) -> tuple[int, str]:
        def ask() -> str:
            try:
                return self._store.compare_set(_KEY, "", f"{code} {reason}").decode()
            except RuntimeError:  # the process that kept the store has ended, so the others know
                return f"{code} {reason}"

        told = _within(answer_s, ask)
        if told is None:
            say(f"train.py: rank {self.rank}: rank 0 or its launcher does not answer, their node may have failed")
            return code, reason
        return _parse(told)

    def _told(self) -> tuple[int, str] | None:
        """What a rank has told all. Returns when the store answers."""
        try:
            return _parse(self._store.get(_KEY).decode()) if self._store.check([_KEY]) else None
        except RuntimeError as error:
            return 1, f"rank 0 or its launcher has ended, look at its output ({str(error).splitlines()[0]})"

    def _stands_still(self) -> tuple[int, str] | None:
        """Tell all if this rank has stood still for too long."""
        position = self.position
        if not position.is_bounded or time.monotonic() - position.since <= self.timeout_s:
            return None
        reason = f"rank {self.rank} has stood still for over watch.timeout_s={self.timeout_s:g} s: {position}"
        return self._tell(1, reason, _ANSWER_S)

    def _watch(self, look: Callable[[], tuple[int, str] | None]) -> None:
        told = None
        while told is None and not self._stopped.wait(_LOOK_EVERY_S):
            try:
                told = look()
            except Exception as error:  # a rank without its watch could keep its GPU for ever
                told = 1, f"rank {self.rank}: its watch failed ({error!r})"
        if told is not None:
            self._leave(*told)

    def _leave(self, code: int, reason: str) -> None:
        """Say where this rank stands, and end it, unless it ends by itself within the time of grace."""
        with self._leaving:  # the other thread may have a reason too
            position = self.position
            try:
                dumped = ""
                if "has stood still" in reason:
                    late = f" (its last collectives were not written within {_ANSWER_S:g} s)"
                    written = _within(_ANSWER_S, self._dump_collectives)
                    dumped = late if written is None else written
                if self._stopped.wait(_GRACE_S):
                    return
                frames = traceback.format_stack(sys._current_frames()[self._main or 0])[-_MOST_FRAMES:]
                here = f"for {time.monotonic() - position.since:.0f} s it was here: {position}{dumped}"
                say(f"train.py: rank {self.rank} ends; {here}. The reason: {reason}\n{''.join(frames)}")
            finally:
                if not self._stopped.is_set():
                    os._exit(code)

    def _dump_collectives(self) -> str:
        from torch._C import _distributed_c10d

        dump = getattr(_distributed_c10d, "_dump_nccl_trace", None) or getattr(
            _distributed_c10d, "_dump_fr_trace", None
        )
        if dump is None:
            return ""
        path = self.run_dir / f"{_COLLECTIVES}{self.rank}"
        try:
            path.write_bytes(dump())
        except (OSError, RuntimeError) as error:  # what it adds is not worth losing the words
            return f" (its last collectives could not be written: {error})"
        return f" (its last collectives: {path})"


def say(text: str) -> None:
    """Print to stderr, for a rank that ends: neither fails nor waits for ever where the output goes nowhere."""

    def write() -> None:
        for stream, words in ((sys.stderr, f"{text}\n"), (sys.stdout, "")):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
                stream.write(words)
                stream.flush()

    _within(_ANSWER_S, write)


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """What `action` gives, None if it takes longer."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _parse(told: str) -> tuple[int, str]:
    code, _, reason = told.partition(" ")
    return int(code), reason


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
