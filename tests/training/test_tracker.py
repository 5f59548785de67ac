"""Figures reach metrics.jsonl whatever the trackers do, and a resumed run does not log a step twice."""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from adaptiveload.training.config import RunConfig
from adaptiveload.training.stragglers import straggler_line
from adaptiveload.training.tracker import Tracker, TrackingConfig
from tests.launching import ROOT, environment

KEY = "0" * 40
STOPPED_SERVICE = """
import signal, sys, time
from pathlib import Path
import psutil
from adaptiveload.training.config import RunConfig
from adaptiveload.training.tracker import Tracker, TrackingConfig

tracker = Tracker(Path(sys.argv[1]), TrackingConfig(wandb="offline", finish_timeout_s=1), RunConfig(), 0, 300)
slowest = 0.0
for step in range(300):
    if step == 5:
        while not (service := [child for child in psutil.Process().children() if child.name() == "wandb-core"]):
            time.sleep(0.1)
        time.sleep(1)
        service[0].send_signal(signal.SIGSTOP)
    started = time.perf_counter()
    tracker.log(step, {"train/loss": 1.0, **{f"rank/{rank:03d}/busy_s": 1.0 for rank in range(64)}})
    slowest = max(slowest, time.perf_counter() - started)
tracker.close()
print("slowest", slowest)
"""


LOST_SERVER = """
import sys, time
from pathlib import Path
from adaptiveload.training.config import RunConfig
from adaptiveload.training.tracker import Tracker, TrackingConfig

tracker = Tracker(Path(sys.argv[1]), TrackingConfig(finish_timeout_s=2), RunConfig(), 0, 50)
slowest = 0.0
for step in range(50):
    started = time.perf_counter()
    tracker.log(step, {"train/loss": 1.0})
    slowest = max(slowest, time.perf_counter() - started)
    if step == 20:
        sys.stdin.readline()
tracker.close()
print("slowest", slowest)
"""


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def log_steps(run_dir: Path, steps: range, config: TrackingConfig) -> None:
    tracker = Tracker(run_dir, config, RunConfig(), steps.start, steps.stop)
    for step in steps:
        tracker.log(step, {"train/loss": 1.0 / (step + 1), "imbalance/step_time_cv": float("nan")})
        tracker.log_schedule({"step": step})
    tracker.close()


def wandb_steps(path: Path, count: int) -> list[int]:
    """Steps in a .wandb file once it has `count`: its service may still be writing when `finish` has come back."""
    until = time.monotonic() + 10
    while len(steps := read_wandb_steps(path)) < count and time.monotonic() < until:
        time.sleep(0.05)
    return steps


def read_wandb_steps(path: Path) -> list[int]:
    """The figure `step` of each history record of a .wandb file."""
    history = [item for record in records_of(path) for item in record.history.item]
    return [int(item.value_json) for item in history if "step" in (item.key, *item.nested_key)]


def records_of(path: Path) -> list[wandb_internal_pb2.Record]:
    """What a .wandb file holds: LevelDB's log format behind 7 bytes."""
    data, position, record, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 2**15 - position % 2**15) < 7:  # no header fits into the rest of a block
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + size > len(data):  # still being written
            break
        record = (b"" if kind in (1, 2) else record) + data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(record))
    return records


def test_without_a_key_wandb_is_offline_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case c52, as are the next tests, those of test_wandb_mode.py and a launch in end_to_end/test_looking.py."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    log_steps(tmp_path / "run", range(3), TrackingConfig())
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [0, 1, 2]
    assert "wandb has no key" in capsys.readouterr().out
    (first,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert wandb_steps(first, 3) == [0, 1, 2]
    time.sleep(1.1)  # wandb names folders by the second
    log_steps(tmp_path / "run", range(2, 4), TrackingConfig())
    (second,) = set((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")) - {first}
    assert wandb_steps(second, 2) == [2, 3]  # though wandb's own count begins anew


class WandbServer(ThreadingHTTPServer):
    """Answers as wandb's server does to begin a run; after `goes_on.clear()` it takes connections and never answers.

    Attributes:
        groups: That runs were begun in.
        uploads: Calls that brought figures or files.
    """

    daemon_threads = True

    def __init__(self, goes_on: bool) -> None:
        super().__init__(("127.0.0.1", 0), _WandbAnswers)
        self.goes_on, self.groups, self.uploads = threading.Event(), [], 0
        if goes_on:
            self.goes_on.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _WandbAnswers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.goes_on.is_set():
            threading.Event().wait()
        data: dict = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            if asked["operationName"] == "UpsertBucket":
                self.server.groups.append(asked["variables"]["groupName"])
                project = {"id": "p", "name": "adaptiveload", "entity": {"id": "e", "name": "me"}}
                bucket = {"id": "r", "name": "r", "displayName": "r", "config": "{}", "project": project}
                data = {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
            elif asked["operationName"] == "CreateRunFiles":
                data = {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        else:
            self.server.uploads += 1
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("listens", [False, True])
def test_wandb_that_does_not_answer_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listens: bool
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", WandbServer(goes_on=False).url if listens else "http://127.0.0.1:9")
    started = time.monotonic()
    tracker = Tracker(tmp_path / "run", TrackingConfig(init_timeout_s=2, group="both"), RunConfig(), 0, 2)
    tracker.log(0, {"train/loss": 1.0})
    tracker.log(1, {"train/loss": 1.0})
    assert time.monotonic() - started < 1.5, "training waits for wandb's server"
    tracker.close()
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [0, 1]
    assert "wandb could not start online" in capsys.readouterr().out
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert wandb_steps(path, 2) == [0, 1]
    assert [record.run.run_group for record in records_of(path) if record.HasField("run")][:1] == ["both"]


def test_wandb_whose_server_goes_away_on_the_way_holds_up_neither_training_nor_exit(tmp_path: Path) -> None:
    """First it falls silent, then it is gone."""
    server = WandbServer(goes_on=True)
    env = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    env |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url, "WANDB_RUN_GROUP": "of the environment"}
    command = [sys.executable, "-c", LOST_SERVER, str(tmp_path / "run")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until = time.monotonic() + 60
    while not server.uploads and time.monotonic() < until:
        time.sleep(0.05)
    server.goes_on.clear()
    process.stdin.write("go on\n")
    process.stdin.flush()
    time.sleep(1)
    server.shutdown()
    server.server_close()
    ended = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert time.monotonic() - ended < 15
    assert float(output.split("slowest")[1].split()[0]) < 1
    assert server.groups[0] == "of the environment"
    assert "wandb has not finished in 2 s" in output
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == list(range(50))


def test_folder_that_wandb_cannot_write_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("a file where the folder should be")
    log_steps(tmp_path / "run", range(3), TrackingConfig(wandb="offline"))
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [0, 1, 2]
    assert "wandb could not start: " in capsys.readouterr().out


def test_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    config = TrackingConfig(wandb="disabled")
    log_steps(tmp_path, range(5), config)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # torn by a kill
    log_steps(tmp_path, range(3, 6), config)
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(6))
    assert steps_in(tmp_path / "schedule.jsonl") == list(range(6))


@pytest.mark.parametrize(("num_ranks", "expected"), [(64, [0, 1, 2, 3, 4]), (65, [0, 3])])
def test_many_ranks_have_figures_of_their_own_every_so_many_steps(
    tmp_path: Path, num_ranks: int, expected: list[int]
) -> None:
    """1,000 of them would be 100 KB a step."""
    tracker = Tracker(tmp_path, TrackingConfig(wandb="disabled", schedule_every_steps=3), RunConfig(), 0, 5)
    for step in range(5):
        tracker.log(step, {"train/loss": 1.0, **{f"rank/{rank:03d}/busy_s": 1.0 for rank in range(num_ranks)}})
    tracker.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all("train/loss" in row for row in rows)
    assert [row["step"] for row in rows if "rank/000/busy_s" in row] == expected
    assert f"over the last {len(expected)} steps" in straggler_line(rows, [])


def test_figures_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1), TrackingConfig(wandb="disabled"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row == {"step": 0, "train/loss": 1.0, "imbalance/step_time_cv": None}


def test_progress_bar_waits_for_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed between, the start-up report, comes first."""
    tracker = Tracker(tmp_path / "run", TrackingConfig(wandb="disabled"), RunConfig(), 0, 2)
    assert capsys.readouterr().err == ""
    time.sleep(0.01)
    tracker.log(0, {"train/loss": 1.0})
    assert "1/2" in capsys.readouterr().err
    tracker.close()


@pytest.mark.stress
def test_service_of_wandb_that_stands_still_holds_up_neither_training_nor_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED_SERVICE, str(tmp_path / "run")]
    # Without WANDB_SERVICE, by which it would share the service of this process.
    env = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == list(range(300))
    assert "wandb has not finished in 1 s" in result.stdout + result.stderr
    # Without its thread the call after some 100 never returns.
    assert float(result.stdout.split("slowest")[1].split()[0]) < 1


def tensorboard_steps(run_dir: Path, key: str) -> list[int]:
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [event.step for event in events.Scalars(key)]


def test_tensorboard_has_every_figure_and_a_resumed_run_repeats_none(tmp_path: Path) -> None:
    config = TrackingConfig(trackers=["tensorboard"])
    log_steps(tmp_path, range(5), config)
    assert tensorboard_steps(tmp_path, "train/loss") == list(range(5))
    time.sleep(1.1)  # names of event files carry whole seconds, and are read in order of their names
    log_steps(tmp_path, range(3, 6), config)
    assert tensorboard_steps(tmp_path, "train/loss") == list(range(6))
    assert not (tmp_path / "wandb").exists()


def test_tensorboard_shows_previews(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "sheet.png")
    tracker = Tracker(tmp_path, TrackingConfig(trackers=["tensorboard"]), RunConfig(), 0, 2)
    tracker.log_previews(1, tmp_path / "sheet.png", [])
    tracker.close()
    (image,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("previews/sheet")
    assert (image.step, image.width, image.height) == (1, 40, 30)


def test_tracker_that_cannot_start_does_not_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    log_steps(tmp_path, range(3), TrackingConfig(trackers=["tensorboard"]))
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2]
    assert "tensorboard could not start" in capsys.readouterr().out


def test_tracker_that_fails_on_the_way_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(tmp_path, TrackingConfig(trackers=["tensorboard"]), RunConfig(), 0, 3)
    tracker.log(0, {"train/loss": 1.0})
    tracker.log_previews(0, tmp_path / "no_such_sheet.png", [])
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1]
    assert "tensorboard failed: " in capsys.readouterr().out


def test_full_disk_leaves_no_tracker_unfinished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's end fails as its lines did; that once left TensorBoard's figures in memory."""
    tracker = Tracker(tmp_path, TrackingConfig(trackers=["tensorboard"]), RunConfig(), 0, 3)
    tracker.log(0, {"train/loss": 1.0})
    tracker._metrics.close()
    tracker._metrics = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)
    with pytest.raises(OSError, match="No space left"):
        tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert tensorboard_steps(tmp_path, "train/loss") == [0]
    assert tracker._schedule.closed
    assert "metrics.jsonl is not whole: OSError(28" in capsys.readouterr().err


def test_unknown_and_missing_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'mlflow' is none of wandb, tensorboard"):
        TrackingConfig(trackers=["wandb", "mlflow"]).check()
    TrackingConfig(trackers=["wandb", "tensorboard"]).check_installed()
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match="tensorboard, which is not installed: pip install tensorboard"):
        TrackingConfig(trackers=["tensorboard"]).check_installed()
