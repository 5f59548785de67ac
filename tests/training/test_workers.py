"""DataLoader workers come from a server without threads, and nothing outlives its rank."""

import itertools
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import pytest
import torch

from adaptiveload.models.packing import filler_sample, pack
from adaptiveload.training import handover
from adaptiveload.training.failures import explain_failure
from adaptiveload.training.feed import MicroBatch
from adaptiveload.training.workers import TAKEN_OVER, Loaded, start_worker_server
from tests.launching import ROOT, data_workers, environment

PROGRAM = """
import sys, time
from adaptiveload.training.workers import Loaded
items = Loaded(range(10**6), num_workers=2, prefetch=2, timeout_s=60)
next(items), next(items)  # one of each worker
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen]:
    """A process that has a server and two workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()


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


class _Blocks:
    """Messages that do not fit into a pipe: a worker is killed while it writes one."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((50_000,), i)


@pytest.mark.parametrize("dataset", [range(10**6), _Blocks()], ids=["small", "large"])
def test_a_dead_worker_is_noticed_long_before_the_time_limit(dataset: Any) -> None:
    others = psutil.Process().children(recursive=True)
    items = Loaded(dataset, range(10**6), num_workers=1, prefetch=4, timeout_s=600)
    next(items)
    (worker,) = data_workers([child for child in psutil.Process().children(recursive=True) if child not in others])
    time.sleep(0.5)  # all that may be loaded ahead is
    worker.kill()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        list(itertools.islice(items, 10))
    items.close()
    assert time.monotonic() - started < 30
    assert "a data worker died" in str(explain_failure(caught.value))


_RESET = "[pair.cc:553] Connection closed by peer [127.0.0.1]:57549. This is typically caused by a remote worker"
_WRITE = "[pair.cc:401] writev [127.0.0.1]:57549: Broken pipe"
_REMOTE = "NCCL error: remote process exited or there was a network error, NCCL version 2.28"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "a data worker died"),
        # Words of a rank's connection too, which a worker that is killed within a message leaves as well.
        (
            RuntimeError(
                "a DataLoader worker exited unexpectedly: ConnectionResetError(104, 'Connection reset by peer')"
            ),
            "a data worker died",
        ),
        (RuntimeError("DataLoader timed out after 5 seconds"), "a data worker hangs"),
        (RuntimeError(_RESET), "the connection to another rank broke"),
        (RuntimeError(_WRITE), "the connection to another rank broke"),
        (RuntimeError(_REMOTE), "the connection to another rank broke"),
        (BrokenPipeError(32, "Broken pipe"), None),
        (ConnectionResetError(104, "Connection reset by peer"), None),  # of a library, to its server
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_only_known_failures_are_explained(error: Exception, cause: str | None) -> None:
    assert (explain_failure(error) or "").startswith(cause or "")
    assert (explain_failure(error) is None) == (cause is None)


class _Tensors:
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(i)
        small = torch.randn(3, 4, generator=rng)
        return {
            "large": torch.randn(400_000, generator=rng),
            "half": small.half(),
            "bfloat16": small.bfloat16().T,
            "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
            "scalar": torch.tensor(i, dtype=torch.int32),
        }


def test_tensors_arrive_as_they_were_sent() -> None:
    loaded = Loaded(_Tensors(), range(4), num_workers=2, prefetch=2, timeout_s=60)
    for i, found in enumerate(loaded):
        expected = _Tensors()[i]
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            found[name].zero_()  # its own memory, and writable
    with pytest.raises(StopIteration):
        next(loaded)


class _Growing:
    def __getitem__(self, size: int) -> tuple[torch.Tensor, int]:
        return torch.full((size,), size, dtype=torch.int32), len(handover._pieces)


def test_a_worker_uses_its_memory_again_but_never_what_is_still_looked_at() -> None:
    sizes = [10, 20_000, 30, 200_000, *[1000] * 60, 500_000, *[10] * 20]
    loaded = Loaded(_Growing(), sizes, num_workers=1, prefetch=4, timeout_s=60)
    kept, opened = [], set(handover._opened)
    for number, size in enumerate(sizes):
        tensor, num_pieces = next(loaded)
        if number in (1, 3, 30):
            kept.append(tensor[size // 2 :].view(-1, 5)[1])  # a view keeps the whole
        assert torch.equal(tensor, torch.full((size,), size, dtype=torch.int32))
        assert num_pieces <= loaded.ahead + TAKEN_OVER + len(kept) + 1
        del tensor
    assert [view.tolist() for view in kept] == [[20_000] * 5, [200_000] * 5, [1000] * 5]
    loaded.close()
    assert [view.tolist() for view in kept] == [[20_000] * 5, [200_000] * 5, [1000] * 5]
    assert handover._opened.keys() == opened


@dataclass
class _Pinned:
    values: torch.Tensor
    is_pinned: bool = False

    def pin_memory(self) -> "_Pinned":
        return _Pinned(self.values.clone(), True)


def test_what_can_be_pinned_is_pinned_where_it_arrives() -> None:
    """As DataLoader's thread does on a GPU: a parcel knows what is in it."""
    values = torch.arange(5.0)
    for item, is_pinned in ((_Pinned(values), True), ((values, "no method"), False)):
        arrived = ForkingPickler.loads(ForkingPickler.dumps(handover.pack_up(item)))
        found = arrived.pin_memory()
        assert isinstance(found, _Pinned) == is_pinned
        assert not is_pinned or found.is_pinned
        assert torch.equal(found.values if is_pinned else found[0], values)
    handover.forget(arrived.worker)


def test_a_pinned_micro_batch_leaves_the_shared_memory(monkeypatch) -> None:
    """Or it would be held twice, and `data.prefetch_mib` be no limit."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # there is none without a GPU
    batch = MicroBatch(pack([filler_sample((1, 2, 2), 64, 8)]), [])
    parcel = ForkingPickler.loads(ForkingPickler.dumps(handover.pack_up(batch)))
    pinned = parcel.pin_memory()
    assert torch.equal(pinned.packed.latents, batch.packed.latents)
    memory = handover._opened[parcel.worker][parcel.piece]
    assert memory[0] == 0, "still in use"
    handover.forget(parcel.worker)


def test_workers_may_open_as_many_files_as_the_system_allows() -> None:
    """An item under way holds one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    start_worker_server()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_closing_ends_the_workers_wherever_they_are(taken: int) -> None:
    """They, and the thread, may be waiting for requests, for room, or for each other."""
    asked: list[int] = []
    before = set(threading.enumerate())
    loaded = Loaded(range(100), (asked.append(i) or i for i in range(100)), num_workers=1, prefetch=2, timeout_s=60)
    assert [next(loaded) for _ in range(taken)] == list(range(taken))
    assert len(asked) == taken + loaded.ahead
    loaded.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "data" and thread not in before]


def test_little_shared_memory_is_told_before_it_kills_a_worker(tmp_path, caplog):
    handover.warn_of_little_room(1, str(tmp_path))
    handover.warn_of_little_room(2**62, str(tmp_path / "absent"))
    assert not caplog.records
    handover.warn_of_little_room(2**62, str(tmp_path))
    assert "docker run --shm-size" in caplog.text
    assert "data.num_workers" in caplog.text
