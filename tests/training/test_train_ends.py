"""How a rank of train.py ends where it fails: with its reason first, and whatever else fails then."""

import errno
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import train
from adaptiveload.training.checkpoint import CheckpointConfig
from adaptiveload.training.distributed import LaunchError
from adaptiveload.training.failures import ending_in_words, explain_failure
from adaptiveload.training.group_watch import Position


class Watch:
    """Of the only rank: no other hears or has told anything."""

    rank = 0

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.at("step 3, its end")

    def at(self, what: str, keys: tuple[str, ...] = (), *, is_bounded: bool = True) -> None:
        self.position = Position(what, keys, is_bounded, 0.0)

    def end_all(self, code: int, reason: str) -> tuple[int, str]:
        return code, reason


def raiser(error: BaseException) -> Any:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def test_a_full_disk_is_named_and_keeps_no_rank_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    did: list[object] = []
    run = SimpleNamespace(
        feed=SimpleNamespace(close=raiser(RuntimeError("no worker"))),
        tracker=SimpleNamespace(close=raiser(full)),
        checkpointer=SimpleNamespace(leave=lambda: did.append("leave")),
    )
    monkeypatch.setattr(train, "train", raiser(full))
    monkeypatch.setattr(train, "end_process", lambda code: sys.exit(code))
    with pytest.raises(SystemExit) as ended:
        train.run_to_its_end(run, Watch(tmp_path), train.StopSignals())
    assert did == ["leave"]
    assert ended.value.code == 1
    reason, *others = capsys.readouterr().err.splitlines()
    assert f"rank 0, step 3, its end: No space left on device: {tmp_path}, where " in reason
    assert " GB are free" in reason
    assert len(others) == 2, "what failed afterwards, a line each"


def test_a_full_disk_at_the_start_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(run_dir=tmp_path, checkpoint=SimpleNamespace(is_on=False), data=SimpleNamespace())
    monkeypatch.setattr(train, "load_config", lambda *_: config)
    monkeypatch.setattr(train, "end_at_signals", raiser(OSError(errno.ENOSPC, "No space left on device")))
    options = SimpleNamespace(config=None, overrides=[])
    with pytest.raises(SystemExit, match=rf"train\.py: No space left on device: {tmp_path}, where "):
        train.start(options, train.StopSignals())


def test_the_file_that_found_no_room_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "metrics.jsonl"
    said = explain_failure(OSError(errno.EDQUOT, "Disk quota exceeded", str(path)), tmp_path)
    assert said is not None
    assert said.startswith(f"Disk quota exceeded: {path}, where ")
    assert explain_failure(OSError(errno.ENOENT, "No such file", str(path)), tmp_path) is None


@pytest.mark.parametrize(
    ("error", "is_known"),
    [(RuntimeError("CUDA error: misaligned"), False), (LaunchError("asked for 2"), True), (ValueError("no key"), True)],
)
def test_an_error_at_the_start_that_nobody_foresaw_keeps_its_traceback(
    error: Exception, is_known: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(train, "load_config", raiser(error))
    with pytest.raises(SystemExit) as ended:
        train.main([])
    assert str(error) in str(ended.value.code)
    assert str(ended.value.code).startswith("train.py: ")
    assert ("Traceback" in capsys.readouterr().err) != is_known


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (RuntimeError("CUDA error: misaligned"), False),
        (KeyError("no such"), False),
        (LaunchError("asked for 2"), True),
        (ValueError("no key"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), True),
    ],
)
def test_a_script_ends_in_one_line_only_where_its_words_are_for_the_user(
    error: Exception, is_known: bool, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended, ending_in_words("sample"):
        raiser(error)()
    assert ended.value.code == f"sample: {error if is_known else repr(error)}"
    assert ("in fail" in capsys.readouterr().err) != is_known


def test_a_save_may_take_longer_than_a_step(tmp_path: Path) -> None:
    """A healthy one to a slow disk was ended as standing still; what ranks do together before it stays bounded."""
    watch, bounded = Watch(tmp_path), {}

    def note(what: str) -> Any:
        return lambda *_: bounded.setdefault(what, watch.position.is_bounded)

    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig(), max_steps=10),
        saved_state=note("state"),
        checkpointer=SimpleNamespace(save=note("save"), finish=note("finish"), take_reports=deque),
        tracker=None,
    )
    measured = SimpleNamespace(stop_signal=15, save_has_failed=False, save_is_overdue=False)
    assert train.save_where_due(run, watch, SimpleNamespace(step=4), measured)
    assert bounded == {"state": True, "save": False, "finish": False}
