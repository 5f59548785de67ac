"""A run's folder: one run at a time, the same on all nodes, and no row of an earlier start lost or written twice."""

import errno
import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adaptiveload.training import run_folder, startup_report
from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.rows import drop_rows_from, move_aside
from adaptiveload.training.run import build_run
from adaptiveload.training.run_folder import LOCK_NAME, hold_run_folder

# What another process does; a process never refuses its own lock.
HOLDER = """
import fcntl, json, os, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(json.dumps({"host": "node7", "pid": os.getpid(), "slurm_job": "42", "slurm_restart": "0"}))
file.flush()
print("held", flush=True)
sys.stdin.read()
"""
ASKS = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


class OnAnotherNode:
    """Rank 1, whose rank 0 has made `main_folder`."""

    is_main = False

    def __init__(self, main_folder: Path) -> None:
        self.main_folder = main_folder

    def run_on_main(self, action: Callable[[], object]) -> object:
        return run_folder._lock(self.main_folder)

    def gather_objects(self, value: tuple[str, bool]) -> list[tuple[str, bool]]:
        return [("node0", True), ("node1", value[1])]


def test_a_folder_that_is_not_shared_is_refused_with_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_SEEN_WITHIN_S", 0.0)
    hold_run_folder(tmp_path / "shared", OnAnotherNode(tmp_path / "shared"))
    of_an_earlier_start = tmp_path / "own" / LOCK_NAME
    message = r"output_dir: .* as node0 \(rank 0\) wrote it is not seen on node1\."
    for content in (None, "", json.dumps({"token": "old"})):
        if content is not None:
            of_an_earlier_start.parent.mkdir(exist_ok=True)
            of_an_earlier_start.write_text(content)
        with pytest.raises(ValueError, match=message):
            hold_run_folder(tmp_path / "own", OnAnotherNode(tmp_path / "mains"))


def test_a_node_that_sees_the_folder_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attribute cache of NFS."""
    late, early = tmp_path / "late", tmp_path / "early"
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: late.exists() or early.rename(late))
    hold_run_folder(late, OnAnotherNode(early))
    assert late.exists()


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    """A run that holds `tmp_path`."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / LOCK_NAME)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def is_held(folder: Path) -> bool:
    asked = subprocess.run([sys.executable, "-c", ASKS, folder / LOCK_NAME], stderr=subprocess.PIPE, text=True)
    assert asked.returncode == 0 or "BlockingIOError" in asked.stderr, asked.stderr
    return asked.returncode != 0


def test_a_second_run_is_refused(tmp_path: Path, holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_FREE_WITHIN_S", 0.0)
    held_by = rf"held by another run: host node7, pid {holder.pid}, Slurm job 42\. .* if node7 is gone, remove .*/lock$"
    for job in (None, "43", "42"):
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        with pytest.raises(ValueError, match=held_by):
            run_folder._lock(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["host"] == "node7", "the holder's name stays"


def test_a_run_whose_launcher_was_killed_is_waited_for(
    tmp_path: Path, holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            holder.kill()
            holder.communicate()

    monkeypatch.setattr(run_folder.time, "sleep", sleep)
    run_folder._lock(tmp_path)
    assert len(looks) == 3
    assert is_held(tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f"host node7, pid {holder.pid}, Slurm job 42; this start waits up to 40 s for its end")


def test_a_requeued_job_takes_the_folder_from_its_earlier_start_and_holds_it(
    tmp_path: Path, holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Slurm has ended what held it, on a node that may be gone, and its lock with it."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_folder._lock(tmp_path)
    assert "still held for this job's earlier start, on node7" in capsys.readouterr().out
    holder.kill()
    holder.communicate()
    assert is_held(tmp_path)


def test_a_full_disk_is_named_and_the_holders_name_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = json.dumps({"host": "node7", "pid": 1})
    (tmp_path / LOCK_NAME).write_text(before)
    for call in ("pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(run_folder.os, call, full)
            with pytest.raises(ValueError, match=rf"output_dir: {tmp_path} cannot be written \(.*No space left"):
                run_folder._lock(tmp_path)
        if call == "pwrite":
            assert (tmp_path / LOCK_NAME).read_text() == before
    (tmp_path / LOCK_NAME).write_text("x" * 1000)
    run_folder._lock(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["token"], "nothing is left of longer content"


def test_where_there_are_no_locks_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    token = run_folder._lock(tmp_path)
    assert run_folder._sees(tmp_path / LOCK_NAME, token)
    assert "no locks on this file system (No locks available)" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output_dir: .*file/run cannot be written \(.*Not a directory"):
        run_folder._lock(tmp_path / "file" / "run")


def rows(*steps: int) -> str:
    return "".join(f'{{"step": {step}, "value": "{"x" * 50}"}}\n' for step in steps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (rows(0, 1, 2, 2, 3, 4), rows(0, 1, 2, 2)),
        (rows(0, 1) + '{"step": 1, "torn', rows(0, 1)),
        (rows(0, 1, 3) + '{"step": 4, "torn', rows(0, 1)),
        (rows(0, 1, 2)[:-1], rows(0, 1, 2)),
        (rows(3, 4), ""),
        (rows(0, 1), rows(0, 1)),
        ("", ""),
        ("\n\n[]\n", ""),
    ],
)
def test_rows_of_later_steps_are_cut_off_in_place(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    inode = path.stat().st_ino
    drop_rows_from(path, 3)
    assert path.read_text() == after
    assert path.stat().st_ino == inode, "a file of gigabytes is not written again"


def test_rows_that_are_not_there_are_no_fault(tmp_path: Path) -> None:
    drop_rows_from(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_what_is_moved_aside_takes_the_next_free_number(tmp_path: Path) -> None:
    paths = [tmp_path / "metrics.jsonl", tmp_path / "samples_used", tmp_path / "lost.jsonl"]
    assert move_aside(paths) is None
    for number in (1, 2):
        paths[0].write_text(f"metrics {number}")
        if number == 2:
            paths[1].mkdir()
        assert move_aside(paths) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl.1", "metrics.jsonl.2", "samples_used.2"]
    assert (tmp_path / "metrics.jsonl.1").read_text() == "metrics 1"


def contents(folder: Path) -> dict[str, str | None]:
    """Of all files, and None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != LOCK_NAME
    }


def test_a_refused_start_changes_no_file_and_a_new_one_loses_nothing(
    run_config: Path, ranks: Ranks, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_to_train(*_) -> str:
        raise ValueError("the plan is empty")

    keys = ["name=again", "checkpoint.every_steps=0", "max_steps=4"]
    config = load_config(run_config, keys)
    folder = config.run_dir
    (folder / "samples_used").mkdir(parents=True)
    names = ("metrics.jsonl", "schedule.jsonl", "lost.jsonl", "skipped.jsonl", "samples_used/rank-000.jsonl")
    for name in names:
        (folder / name).write_text(rows(0, 1, 2, 3))
    (folder / "config.yaml").write_text("name: again")
    before = contents(folder)
    with pytest.raises(ValueError, match=r"profile\.ranks"):
        build_run(load_config(run_config, [*keys, "profile.steps=[0, 1]", "profile.ranks=[64]"]), ranks)
    assert contents(folder) == before
    with monkeypatch.context() as patch:
        patch.setattr(startup_report, "describe_schedule", nothing_to_train)
        with pytest.raises(ValueError, match="the plan is empty"):
            build_run(config, ranks)
    assert contents(folder) == before

    run = build_run(config, ranks)
    run.feed.close()
    run.tracker.close()
    after = contents(folder)
    for name in names:
        file, _, rest = name.partition("/")
        assert after["/".join(filter(None, (f"{file}.1", rest)))] == before[name]
        assert not after.get(name)
    said = capsys.readouterr().out
    assert re.search(r"metrics.jsonl, schedule.jsonl, .* are kept", said)
    assert "the run begins at step 0" in said
