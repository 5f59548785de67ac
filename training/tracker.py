"""Where a run's figures go: always `metrics.jsonl` and `schedule.jsonl`, a progress bar, and wandb or TensorBoard.

Only this file imports wandb. No tracker stops a run: wandb works offline without a key and not at all where WANDB_MODE
says so, and a tracker that fails is left out from there, while the run goes on with the local files.
"""

import contextlib
import importlib.util
import json
import math
import netrc
import os
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import psutil
from PIL import Image
from tqdm import tqdm

from adaptiveload.scheduling.choices import check_choice
from adaptiveload.training.rows import drop_rows_from

FIGURES_NAMES = ("metrics.jsonl", "schedule.jsonl")
# Calls that a tracker may lag behind; a call is one step's figures, some KiB.
_MOST_WAITING = 1000
_ABANDON_WITHIN_S = 5.0
# Ranks whose own figures every step may have: three keys each, which are 100 KB a step for 1,000 ranks.
_MOST_RANKS = 64
_WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # one service; a key for either serves both


@dataclass
class TrackingConfig:
    """Where figures go besides `metrics.jsonl`, which always has them.

    Attributes:
        trackers: Any of "wandb" and "tensorboard" (`pip install tensorboard`), whose files are in `RUN/tensorboard`.
        wandb: online, offline or disabled; "auto" is what WANDB_MODE says, and where that is not set, online. Online
            without a key is offline.
        project: wandb project.
        group: Runs of one group stand together in wandb, such as those of a comparison; None takes WANDB_RUN_GROUP.
        init_timeout_s: How long wandb's server may take to answer at the start, before the run is tracked offline.
        finish_timeout_s: Longest wait for a tracker at the end, such as wandb for a slow network.
        schedule_every_steps: Steps between lines of `schedule.jsonl`; a line grows with ranks times slots. Above 64
            ranks also between the steps that have figures of each rank, `rank/NNN/...`.
    """

    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    wandb: str = "auto"
    project: str = "adaptiveload"
    group: str | None = None
    init_timeout_s: float = 20.0
    finish_timeout_s: float = 60.0
    schedule_every_steps: int = 1

    def check(self) -> None:
        """Raise ValueError for an unknown tracker or mode."""
        if unknown := [name for name in self.trackers if name not in _TRACKERS]:
            raise ValueError(f"tracking.trackers={self.trackers}: {unknown[0]!r} is none of {', '.join(_TRACKERS)}")
        check_choice("tracking.wandb", self.wandb, ("auto", "online", "offline", "disabled"))
        if not self.init_timeout_s > 0 or not self.finish_timeout_s > 0:
            raise ValueError(
                f"tracking.init_timeout_s={self.init_timeout_s} and tracking.finish_timeout_s={self.finish_timeout_s} "
                "must be positive seconds"
            )
        if self.schedule_every_steps < 1:
            raise ValueError(f"tracking.schedule_every_steps={self.schedule_every_steps} must be at least 1")

    def check_installed(self) -> None:
        """Raise ValueError for a tracker whose package is missing; on every rank, before anything is built."""
        for name in self.used_trackers:
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"tracking.trackers has {name}, which is not installed: pip install {name}")

    @property
    def used_trackers(self) -> list[str]:
        """`trackers` without a wandb that is switched off."""
        return [name for name in self.trackers if name != "wandb" or self.wandb_mode != "disabled"]

    @property
    def wandb_mode(self) -> str:
        """The mode that is asked for, here or by WANDB_MODE."""
        asked = self.wandb if self.wandb != "auto" else os.environ.get("WANDB_MODE") or "online"
        return {"dryrun": "offline", "run": "online"}.get(asked, asked)  # wandb's older words


class Sink(Protocol):
    """One tracker, called from a thread of its own. When a method raises, the run goes on without it."""

    def start(self, say: Callable[[str], None]) -> None:
        """Get ready for the other calls; `say` takes a line for the log."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the figures of a step; several times for one step, with other keys."""

    def log_previews(self, step: int, sheet: Path, files: Sequence[Path]) -> None:
        """Take a contact sheet and the clips on it."""

    def finish(self) -> None:
        """Write what is left."""

    def abandon(self) -> None:
        """Let the process end although a call of this sink has failed or not come back."""


class Tracker:
    """Writes the figures of each step. Make one on rank 0 only.

    Args:
        run_dir: Folder of the run.
        config: Tracking options.
        run_config: The whole configuration, for wandb's table.
        first_step: Step that comes next; figures of it and later ones from an earlier try are dropped.
        max_steps: Length of the progress bar.
    """

    def __init__(self, run_dir: Path, config: TrackingConfig, run_config: Any, first_step: int, max_steps: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics, self._schedule = (_open_from(run_dir / name, first_step) for name in FIGURES_NAMES)
        self._finish_timeout_s = config.finish_timeout_s
        self._ranks_every_steps = config.schedule_every_steps
        # With a delay its first line waits for the first step, and so comes after the start-up report.
        self._bar = tqdm(
            total=max_steps, initial=first_step, desc=run_dir.name, unit="step", dynamic_ncols=True, delay=1e-3
        )
        sinks = {name: _TRACKERS[name](run_dir, config, run_config, first_step) for name in config.used_trackers}
        self._threads = [_SinkThread(name, sink, self.message) for name, sink in sinks.items()]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the figures of `step`, keys as in docs/metrics.md; of many ranks not at every step."""
        if step % self._ranks_every_steps and f"rank/{_MOST_RANKS:03d}/busy_s" in metrics:
            metrics = {key: value for key, value in metrics.items() if not key.startswith("rank/")}
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        _write_line(self._metrics, {"step": step, **finite})
        self._to_sinks(lambda sink: sink.log(step, metrics))
        if "train/loss" in metrics:
            self._bar.update(step + 1 - self._bar.n)
            shown = {"loss": "train/loss", "cv": "imbalance/step_time_cv", "tok/s": "perf/tokens_per_s"}
            self._bar.set_postfix({name: f"{metrics[key]:.3g}" for name, key in shown.items() if key in metrics})

    def log_schedule(self, record: dict[str, Any]) -> None:
        """Write what each rank did in each slot of a step; scripts.report draws it."""
        _write_line(self._schedule, record)

    def log_previews(self, step: int, sheet: Path, files: Sequence[Path]) -> None:
        """Show a contact sheet and the clips on it; the run's folder has them already."""
        self._to_sinks(lambda sink: sink.log_previews(step, sheet, files))

    def _to_sinks(self, give: Callable[[Sink], None]) -> None:
        for thread in self._threads:
            thread.give(give)

    def message(self, text: str) -> None:
        """Print a line without tearing the progress bar."""
        self._bar.write(text)

    def close(self) -> None:
        """Close the files and end the trackers, each within `tracking.finish_timeout_s`.

        What fails is told and not raised: a file that a full disk has torn fails again here, and all must end.
        """
        ends = {"progress bar": self._bar.close, "metrics.jsonl": self._metrics.close}
        ends |= {"schedule.jsonl": self._schedule.close}
        ends |= {thread.name: partial(thread.finish, self._finish_timeout_s) for thread in self._threads}
        for name, end in ends.items():
            try:
                end()
            except Exception as error:
                print(f"{name} is not whole: {error!r}", file=sys.stderr, flush=True)


class _SinkThread:
    """Feeds a sink, so that one that fails or stands still neither ends nor holds up training, nor its start.

    Measured with wandb's service stopped: its calls block for good once the socket is full, after some 100 steps.
    """

    def __init__(self, name: str, sink: Sink, say: Callable[[str], None]) -> None:
        self.name, self._sink, self._say = name, sink, say
        self._waiting: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_MOST_WAITING)
        self._is_off = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def give(self, call: Callable[[Sink], None] | None) -> None:
        """Leave a call for the thread, or None to end it; never waits."""
        if self._is_off:
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self._turn_off(f"has taken nothing for {_MOST_WAITING} steps")

    def finish(self, timeout_s: float) -> None:
        """End the sink after all that was left for it; waits `timeout_s` at most."""
        if not self._is_off:
            self.give(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._turn_off(f"has not finished in {timeout_s:g} s")
        if self._is_off:
            self._sink.abandon()

    def _work(self) -> None:
        what = "could not start"
        try:
            self._sink.start(self._say)
            what = "failed"
            while (call := self._waiting.get()) is not None and not self._is_off:
                call(self._sink)
            if not self._is_off:
                self._sink.finish()
        except Exception as error:  # whatever a tracker raises, the run is worth more
            self._turn_off(f"{what}: {error}")

    def _turn_off(self, why: str) -> None:
        if self._is_off:
            return
        self._is_off = True
        self._say(f"{self.name} {why} and is off from here; metrics.jsonl has every figure")


class _Wandb:
    """A run of wandb. Steps are a figure of their own, `step`: wandb drops what comes for a step before its last one,
    and a run that goes on from a checkpoint repeats steps.
    """

    def __init__(self, run_dir: Path, config: TrackingConfig, run_config: Any, first_step: int) -> None:
        self._run_dir, self._config, self._run_config = run_dir, config, run_config
        self._run: Any = None

    def start(self, say: Callable[[str], None]) -> None:
        mode = self._config.wandb_mode
        if mode == "online" and not _has_wandb_key():  # for which it would ask in the terminal
            say(f"wandb has no key: it is offline, see `wandb login` and `wandb sync` for {self._run_dir / 'wandb'}")
            mode = "offline"
        try:
            self._run = self._begin(mode)
        except Exception as error:
            if mode == "offline":
                raise
            say(f"wandb could not start online: {error}; it is offline, see `wandb sync` for {self._run_dir / 'wandb'}")
            self._end_service()  # which holds the run's id, and may wait for the server without end
            self._run = self._begin("offline")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_previews(self, step: int, sheet: Path, files: Sequence[Path]) -> None:
        import wandb

        clips = [wandb.Video(str(path), format="mp4") for path in files if path.suffix == ".mp4"]
        clips_by_key = {"previews/clips": clips} if clips else {}
        self._run.log({"step": step, "previews/sheet": wandb.Image(str(sheet)), **clips_by_key})

    def finish(self) -> None:
        self._run.finish()

    def abandon(self) -> None:
        # At exit wandb waits for its service without end.
        end = threading.Thread(target=self._end_service, name="tracker-end", daemon=True)
        end.start()
        end.join(_ABANDON_WITHIN_S)

    def _begin(self, mode: str) -> Any:
        import wandb

        return wandb.init(
            project=self._config.project,
            group=self._config.group,
            name=self._run_dir.name,
            id=_wandb_id(self._run_dir),
            resume="allow",
            dir=str(self._run_dir),
            mode=mode,
            config=asdict(self._run_config),
            settings=wandb.Settings(init_timeout=self._config.init_timeout_s, console="off", silent=True),
        )

    @staticmethod
    def _end_service() -> None:
        import wandb

        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "wandb-core":
                    for part in (*process.children(recursive=True), process):
                        part.kill()
        with contextlib.suppress(Exception, SystemExit):  # with the code of the service that is gone
            wandb.teardown()


class _TensorBoard:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, run_dir: Path, config: TrackingConfig, run_config: Any, first_step: int) -> None:
        self._folder, self._run_config, self._first_step = run_dir / "tensorboard", run_config, first_step
        self._writer: Any = None

    def start(self, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what an earlier try wrote of the first step and later ones.
        self._writer = SummaryWriter(self._folder, purge_step=self._first_step)
        text = json.dumps(asdict(self._run_config), indent=1, default=str)
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), self._first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_previews(self, step: int, sheet: Path, files: Sequence[Path]) -> None:
        with Image.open(sheet) as image:
            self._writer.add_image("previews/sheet", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        pass  # its threads are daemons


_TRACKERS: dict[str, Callable[[Path, TrackingConfig, Any, int], Sink]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
}


def _wandb_id(run_dir: Path) -> str:
    """The run's wandb id, the same after every resume."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()


def _has_wandb_key() -> bool:
    """Whether wandb would find a key for its server: in the environment, in netrc or in its own settings."""
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.base_url).netloc
    try:
        known = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
    except (OSError, netrc.NetrcParseError):
        return bool(settings.api_key)
    hosts = _WANDB_HOSTS if host in _WANDB_HOSTS else (host,)
    return bool(settings.api_key) or any(known.authenticators(name) for name in hosts)


def _open_from(path: Path, first_step: int) -> Any:
    """Open a JSONL file for appending, without the lines of `first_step` and later ones."""
    drop_rows_from(path, first_step)
    return path.open("a", buffering=1)


def _write_line(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
