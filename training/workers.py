"""Worker processes of a rank's DataLoader: they come from a server of one thread, and end with the rank.

A rank has threads of gloo and CUDA. A worker forked beside them may wait for ever for a lock that one of them held at
that moment, so nothing is forked from a rank (a stream on 4 ranks hung so).
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")

# What takes long to import, once for all workers of a rank. None of these starts a thread; pyarrow would.
_PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "accelerate", "omegaconf", "scipy.optimize"]
# A dead worker is noticed after so long.
_CHECK_EVERY_S = 2.0


def start_worker_server() -> None:
    """Start the process that workers are forked from, so that it has imported its modules when they are needed.

    It ends after this process and all workers have ended, however that happens.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


class Loaded(Generic[T]):
    """What `dataset` makes of each request, or all items of an iterable dataset, in order.

    Args:
        dataset: Picklable if there are workers.
        requests: Arguments of `dataset[...]`; none for an iterable dataset.
        num_workers: Processes; 0 loads in this one, when an item is asked for.
        prefetch: Items that each worker has ready.
        timeout_s: Longest wait for an item.
        pin_memory: For copies to the GPU that do not wait.

    Attributes:
        wait_s: Seconds that `next` has taken so far.
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
        if num_workers:
            start_worker_server()
        self._items: Iterator[T] = iter(
            DataLoader(
                dataset,
                sampler=requests,
                batch_size=None,
                num_workers=num_workers,
                prefetch_factor=prefetch if num_workers else None,
                timeout=min(timeout_s, _CHECK_EVERY_S) if num_workers else 0,
                pin_memory=pin_memory,
                multiprocessing_context="forkserver" if num_workers else None,
                worker_init_fn=_end_with_rank,
            )
        )

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            RuntimeError: If a worker has died, or an item took longer than `timeout_s`; see `explain_worker_failure`.
        """
        started = time.perf_counter()
        try:
            while True:
                try:
                    return next(self._items)
                except RuntimeError as error:
                    # DataLoader looks whether its workers live each time that it has waited in vain.
                    if "DataLoader timed out" not in str(error) or time.perf_counter() - started > self.timeout_s:
                        raise
                except (ConnectionError, EOFError) as error:  # it died while it handed something over
                    raise RuntimeError(f"a DataLoader worker exited unexpectedly: {error!r}") from error
        finally:
            self.wait_s += time.perf_counter() - started

    def close(self) -> None:
        """End the workers."""
        self._items = iter(())


def _end_with_rank(_: int) -> None:
    """Have this worker end when its rank does, also by SIGKILL.

    DataLoader's own check looks at the parent process, which is the server, and that lives as long as its workers.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with rank", daemon=True).start()


def explain_worker_failure(error: RuntimeError, rank: int) -> str | None:
    """What to tell the user if `error` is the DataLoader's way of saying that a worker died or hangs, else None."""
    text = str(error)
    if "DataLoader timed out" in text:
        cause = "hangs: the storage does not answer (data.worker_timeout_s)"
    elif "is killed by signal" in text or "exited unexpectedly" in text:
        cause = (
            "died. Killed from outside it is most often for memory: lower data.prefetch_mib or data.num_workers, "
            "and see the kernel's log"
        )
    else:
        return None
    return f"rank {rank}: a data worker {cause}. The last checkpoint is good. ({text.splitlines()[0]})"
