"""Worker processes of a rank's DataLoader: they come from a server without the rank's threads, and end with the rank.

A rank has threads of gloo and CUDA. A worker forked beside them may wait for ever for a lock that one of them held at
that moment, so nothing is forked from a rank (a stream on 4 ranks hung so).
"""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from queue import Empty, Queue, SimpleQueue
from types import ModuleType
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

from adaptiveload.training.handover import Parcel, forget, pack_up
from adaptiveload.training.stop_signals import block_stop_signals

T = TypeVar("T")

# What takes long to import, once for all workers of a rank. None of these starts a thread, but for those of BLAS where
# OMP_NUM_THREADS allows them; pyarrow would.
_PRELOADED = ["torch.utils.data", "safetensors.torch", "einops"]
# Items that have been taken over from the workers and wait for the rank, and with the one that the thread brings.
_READY = 2
TAKEN_OVER = _READY + 1
_END = object()
# How often a rank that waits looks whether its workers live.
_CHECK_EVERY_S = 1.0
_CLOSE_WITHIN_S = 5.0
# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def start_worker_server() -> None:
    """Start the process that workers are forked from, so that it has imported its modules when they are needed.

    It ends after this process and all workers have ended, however that happens. This process and they may then have as
    many files open as the system allows: every item under way holds one, and 1,024, the usual limit, are soon used up.
    Signals that ask the run to end often go to all its processes: the workers must live until the rank has come to the
    end of its step.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    with block_stop_signals(), _quiet_tracker():
        resource_tracker.ensure_running()  # it unblocks SIGTERM
    with block_stop_signals():
        forkserver.ensure_running()


@contextlib.contextmanager
def _quiet_tracker() -> Iterator[None]:
    """Have a resource tracker that starts now not warn of semaphores: it removes what a rank leaves that ends early."""
    name, before = "PYTHONWARNINGS", os.environ.get("PYTHONWARNINGS")
    os.environ[name] = ",".join(filter(None, (before, "ignore:resource_tracker")))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Loaded(Generic[T]):
    """What `dataset` makes of each request, or all items of an iterable dataset, in order.

    A thread takes items over from the workers before they are asked for: on busy cores that takes milliseconds, in
    which the two processes wait for each other. Requests are taken in the thread that calls `next`.

    Args:
        dataset: Picklable if there are workers, and not of a class of the started script.
        requests: Arguments of `dataset[...]`; none for an iterable dataset.
        num_workers: Processes; 0 loads in this one, when an item is asked for.
        prefetch: Items that each worker has ready.
        timeout_s: Longest wait for an item.
        pin_memory: For copies to the GPU that do not wait.

    Attributes:
        wait_s: Seconds that `next` has taken so far.
        ahead: Most requests that are taken before their items are asked for.
    """

    def __init__(
        self,
        dataset: "Dataset[T]",
        requests: Iterable[Any] | None = None,
        *,
        num_workers: int,
        prefetch: int | None,
        timeout_s: float,
        pin_memory: bool = False,
    ) -> None:
        self.wait_s = 0.0
        self.timeout_s = timeout_s
        self.ahead = num_workers * (prefetch or 0) + _READY if num_workers else 0
        self._requests = None if requests is None else iter(requests)
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._ready: Queue[T | BaseException] = Queue(_READY)
        self._closed = threading.Event()
        self._ask(self.ahead)
        if num_workers:
            start_worker_server()
        others = multiprocessing.active_children()
        loader = DataLoader(
            dataset,
            sampler=None if requests is None else iter(self._asked.get, _END),
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            pin_memory=pin_memory,
            collate_fn=pack_up if num_workers else None,
            multiprocessing_context="forkserver" if num_workers else None,
            worker_init_fn=_set_up_worker,
        )
        with _script_left_out():
            self._items: Iterator[T] = iter(loader)
        self._workers = [child for child in multiprocessing.active_children() if child not in others]
        self._thread = threading.Thread(target=self._take_over, name="data", daemon=True)
        if num_workers:
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            RuntimeError: If a worker has died, or an item took longer than `timeout_s`; see `failures.explain_failure`.
        """
        started = time.perf_counter()
        try:
            self._ask(1)
            if not self._workers:
                return next(self._items)
            item = self._wait(started)
            if isinstance(item, BaseException):
                self._ready.put(item)  # for whoever asks again
                raise item
            return item
        finally:
            self.wait_s += time.perf_counter() - started

    def close(self) -> None:
        """End the workers."""
        self._closed.set()
        self._asked.put(_END)  # the thread may wait for a request
        all_live = all(worker.is_alive() for worker in self._workers)
        deadline = time.perf_counter() + (_CLOSE_WITHIN_S if all_live else _CHECK_EVERY_S)
        while self._thread.is_alive() and time.perf_counter() < deadline:
            with contextlib.suppress(Empty):  # or for room
                self._ready.get(timeout=0.1)
        if self._thread.is_alive():  # a worker that hangs, or died within a message: it will not be waited for
            for worker in self._workers:
                worker.kill()
        # The last of what refers to the workers' queues, which then give their semaphores back.
        self._items, self._ready = iter(()), Queue()
        for worker in self._workers:
            forget(worker.pid)

    def _ask(self, count: int) -> None:
        for _ in range(count if self._requests is not None else 0):
            self._asked.put(next(self._requests, _END))

    def _take_over(self) -> None:
        items = self._items
        try:
            while not self._closed.is_set():
                item = next(items)
                self._ready.put(item.open() if isinstance(item, Parcel) else item)
        except (ConnectionError, EOFError) as error:
            self._ready.put(RuntimeError(f"a DataLoader worker exited unexpectedly: {error!r}"))
        except BaseException as error:  # the end, or a failure: `next` raises it
            self._ready.put(error)

    def _wait(self, started: float) -> T | BaseException:
        """What the thread hands over. It cannot be relied on to notice a worker that died within a message."""
        dead: list[int | None] = []
        while True:
            try:
                return self._ready.get(timeout=_CHECK_EVERY_S)
            except Empty:
                if dead:  # for so long that nothing more can come from it
                    return RuntimeError(f"a DataLoader worker (pid {dead[0]}) exited unexpectedly")
                dead = [worker.pid for worker in self._workers if not worker.is_alive()]
                if time.perf_counter() - started > self.timeout_s:
                    return RuntimeError(f"DataLoader timed out after {self.timeout_s} seconds")


@contextlib.contextmanager
def _script_left_out() -> Iterator[None]:
    """Have processes that start now not import the script of this one.

    multiprocessing has each of them run train.py's imports again: a second and 150 MB a worker, for nothing.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _set_up_worker(_: int) -> None:
    _keep_freed_memory()
    _end_with_rank()


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next sample, where it is glibc's.

    A worker frees all that it has allocated with every sample. glibc would give it back to the kernel each time and ask
    for it anew, a page fault for every 4 KiB: four fifths of a worker's time at 1 MB samples.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, 2**28)


def _end_with_rank() -> None:
    """Have this worker end when its rank does, also by SIGKILL.

    DataLoader's own check looks at the parent process, which is the server, and that lives as long as its workers.
    A rank that leaves without having closed them sends SIGTERM, and waits; that of others is for the rank alone.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    def obey() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank.pid:
            pass
        os._exit(1)

    for end in (wait, obey):
        threading.Thread(target=end, name="end with rank", daemon=True).start()
