"""DataLoader workers come from a server without threads, and nothing outlives its rank."""

import itertools
import subprocess
import sys
import time

import psutil
import pytest

from adaptiveload.training.workers import Loaded, explain_worker_failure
from tests.launching import ROOT, data_workers, environment

PROGRAM = """
import sys, time
from adaptiveload.training.workers import Loaded
items = Loaded(range(10**6), num_workers=2, prefetch=2, timeout_s=60)
next(items)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def owner() -> subprocess.Popen:
    """A process that has a server and two workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_workers_are_forked_from_a_process_of_one_thread(owner: subprocess.Popen) -> None:
    family = psutil.Process(owner.pid).children(recursive=True)
    workers = data_workers(family)
    assert len(workers) == 2
    (server,) = {worker.parent() for worker in workers}
    assert server.num_threads() == 1
    owner.communicate(b"\n", timeout=30)
    assert owner.returncode == 0
    assert psutil.wait_procs(family, timeout=15)[1] == []


def test_nothing_outlives_a_killed_rank(owner: subprocess.Popen) -> None:
    family = psutil.Process(owner.pid).children(recursive=True)
    assert len(family) >= 3  # server and workers; Python's tracker of semaphores
    owner.kill()
    owner.wait()
    assert psutil.wait_procs(family, timeout=15)[1] == []


def test_a_dead_worker_is_noticed_long_before_the_time_limit() -> None:
    items = Loaded(range(10**6), num_workers=1, prefetch=2, timeout_s=600)
    assert next(items) == 0
    (worker,) = data_workers(psutil.Process().children(recursive=True))
    worker.kill()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        list(itertools.islice(items, 10))
    assert time.monotonic() - started < 20
    assert "a data worker died" in str(explain_worker_failure(caught.value, 0))


def test_only_failures_of_workers_are_explained() -> None:
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert "rank 3: a data worker died" in str(explain_worker_failure(error, 3))
    assert explain_worker_failure(RuntimeError("NCCL"), 3) is None
