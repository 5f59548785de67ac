"""What to tell the user about an error that ends a run, where its own words do not."""

import contextlib
import errno
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from adaptiveload.training.checkpoint import SaveError
from adaptiveload.training.distributed import LaunchError
from adaptiveload.training.memory_limits import MicroBatchMemoryError
from adaptiveload.training.staging import HostMemoryError

# Their own words are for the user.
_OWN = (HostMemoryError, LaunchError, MicroBatchMemoryError, SaveError)

# Of DataLoader, for a worker that has ended; of gloo and NCCL, for a rank that has: where this rank reads from it, or
# writes to it before that is noticed.
_DEAD_WORKER = ("is killed by signal", "exited unexpectedly")
_DEAD_RANK = ("by peer", "Broken pipe", "remote process exit")


def explain_failure(error: Exception, run_dir: Path | None = None) -> str | None:
    """The cause in words for the user, None if nothing is known about such an error.

    `run_dir` is where a run has its files: an error of writing to one does not always say to which.
    """
    text = str(error)
    if isinstance(error, _OWN):
        return text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _of_disk(error, run_dir)
    if not isinstance(error, RuntimeError):
        return None
    if "DataLoader timed out" in text:
        return _of_worker("hangs: the storage does not answer (data.worker_timeout_s)", text)
    # Before what is said of ranks: the connection to a worker breaks in the same words.
    if any(words in text for words in _DEAD_WORKER):
        return _of_worker(
            "died. Killed from outside it is most often for memory: lower data.prefetch_mib or data.num_workers, "
            "and see the kernel's log; by a bus error, for room in /dev/shm (docker run --shm-size)",
            text,
        )
    if any(words in text for words in _DEAD_RANK):
        return f"the connection to another rank broke, it has ended: look for its last words ({text})"
    return None


@contextlib.contextmanager
def ending_in_words(program: str) -> Iterator[None]:
    """Within it an error ends a script in one line, with the traceback before it where the words alone may not do."""
    try:
        yield
    except Exception as error:
        # Files of a script are named by its user.
        known = str(error) if isinstance(error, (ValueError, OSError)) else explain_failure(error)
        if known is None:
            traceback.print_exc()
        sys.exit(f"{program}: {known or repr(error)}")


def _of_worker(cause: str, text: str) -> str:
    return f"a data worker {cause}. The last checkpoint is good. ({text.splitlines()[0]})"


def _of_disk(error: OSError, run_dir: Path | None) -> str:
    path = Path(str(error.filename or run_dir or "."))
    free = ""
    with contextlib.suppress(OSError):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        free = f", where {shutil.disk_usage(there).free / 1e9:.3g} GB are free"
    return f"{error.strerror}: {path}{free}. Make room and start the run again. The last checkpoint is good"
