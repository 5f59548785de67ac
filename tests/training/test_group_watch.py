"""The watch ends its rank whatever else fails: the store's node, the output, the watch itself."""

import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptiveload.training import group_watch
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.group_watch import GroupWatch, WatchConfig
from tests.launching import ROOT, environment


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.training.watched_rank", *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes)


@pytest.fixture
def frozen_store() -> Iterator[list[subprocess.Popen]]:
    """A rank that is to stand still and one that is to fail, whose store has just stopped to answer."""
    started = [start("store", 0)]
    try:
        port = started[0].stdout.readline().split()[1]
        started += [start(what, port) for what in ("stands", "fails")]
        for rank in started[1:]:
            assert rank.stdout.readline() == "ready\n", rank.communicate()
        started[0].send_signal(signal.SIGSTOP)
        yield started[1:]
    finally:
        for process in started:
            process.kill()  # also one that is stopped
            process.wait()


def test_a_store_that_does_not_answer_holds_up_no_rank_that_ends(frozen_store: list[subprocess.Popen]) -> None:
    """The first node has lost its power: its connections stay open (a stopped process is as silent)."""
    stands, fails = frozen_store
    output, errors = stands.communicate("\n", timeout=60)
    assert stands.returncode == 1, errors
    assert "has stood still for over watch.timeout_s=0.2 s: step 7, its end (sample3)" in errors
    assert "their node may have failed" in errors
    assert "ever.wait()" in errors, "the line where it stands"
    output, errors = fails.communicate("\n", timeout=60)
    assert (output, fails.returncode) == ("(3, 'its own reason')\n", 3), errors


class SlowStore:
    """Of a first node that has too much to do; a rank that ran out of memory has told it before."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        threading.Event().wait(0.1)
        return b"86 out of memory"


def test_a_rank_that_fails_waits_longer_for_what_another_has_told(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_watch, "_ANSWER_S", 0.0)
    watch = GroupWatch(0, WatchConfig(), tmp_path)
    watch._store = SlowStore()
    assert watch.end_all(1, "the connection to another rank broke") == (86, "out of memory")


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that this process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(group_watch, "_GRACE_S", 0.0)
    monkeypatch.setattr(group_watch.os, "_exit", codes.append)
    return codes


def test_a_rank_that_nobody_listens_to_ends(
    ranks: Ranks, tmp_path: Path, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = GroupWatch(0, WatchConfig(), tmp_path)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    watch._leave(3, "a reason")
    assert codes == [3]
    watch.stop()


def test_a_watch_that_fails_ends_its_rank(
    ranks: Ranks, tmp_path: Path, codes: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(group_watch.os, "_exit", lambda code: (codes.append(code), ended.set()))
    monkeypatch.setattr(group_watch, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(GroupWatch, "_told", lambda watch: {}["missing"])
    watch = GroupWatch(0, WatchConfig(), tmp_path)
    assert ended.wait(60)
    watch.stop()
    assert codes == [1]
    assert "its watch failed (KeyError('missing'))" in capsys.readouterr().err
