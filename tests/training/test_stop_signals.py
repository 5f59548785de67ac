"""Signals to one rank: where nothing is saved they end it, and a second one does not wait for the save (case c37)."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from adaptiveload.training.stop_signals import REPEATED_AFTER_S, StopSignals, block_stop_signals
from tests.launching import ROOT, environment


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    """`signalled_rank.py`, started with the signals blocked, as `scripts.launch` starts ranks."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "tests.training.signalled_rank", request.param]
    with block_stop_signals():
        process = subprocess.Popen(command, cwd=ROOT, env=environment() | {"RANK": "3"}, text=True, **pipes)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("rank", ["started"], indirect=True)
def test_a_rank_that_catches_no_signals_ends_by_them(rank: subprocess.Popen) -> None:
    assert rank.stdout.readline() == "started\n", rank.communicate()
    rank.send_signal(signal.SIGTERM)
    rank.communicate(timeout=60)
    assert rank.returncode == -signal.SIGTERM


@pytest.mark.parametrize("rank", ["caught"], indirect=True)
def test_a_repeated_signal_ends_a_rank_that_waits(rank: subprocess.Popen) -> None:
    """SIGUSR1 and SIGTERM both come under Slurm, and one of them may come twice within moments."""
    assert rank.stdout.readline() == "started\n", rank.communicate()
    for number, seen in ((signal.SIGUSR1, 100.0), (signal.SIGTERM, 101.0), (signal.SIGUSR1, 104.9)):
        rank.send_signal(number)
        assert float(rank.stdout.readline()) == seen
    rank.send_signal(signal.SIGUSR1)
    _, errors = rank.communicate(timeout=60)
    assert rank.returncode == 128 + signal.SIGUSR1
    assert errors == (
        "train.py: SIGUSR1 came again, rank 3 ends at once: a save under way is given up, the last committed "
        "checkpoint is good\n"
    )


def test_a_signal_is_repeated_if_it_comes_well_after_the_first_of_its_kind() -> None:
    times = iter((0.0, 0.1, 7.0, REPEATED_AFTER_S, 6.9 + REPEATED_AFTER_S, 7.0 + REPEATED_AFTER_S))
    stop = StopSignals(lambda: next(times))
    came = [signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1]
    assert [stop.is_repeated(number) for number in came] == [False, False, False, True, False, True]
    assert not stop.is_repeated(signal.SIGCHLD)


LAUNCHER = """
import os, signal, subprocess, sys, time
from scripts.launch import forward_signals
rank = [sys.executable, "-c", "import signal; signal.sigwait({signal.SIGTERM})"]
forward_signals(rank)
os.kill(os.getpid(), signal.SIGTERM)
while signal.sigpending():
    time.sleep(0.01)
subprocess.run(["sleep", "0.5"], check=True)  # as nvidia-smi, which the ranks' signals are not for
sys.exit(subprocess.Popen(rank).wait(timeout=30))
"""


def test_a_signal_to_the_launcher_waits_for_its_ranks() -> None:
    subprocess.run([sys.executable, "-c", LAUNCHER], cwd=ROOT, env=environment(), check=True, timeout=60)
