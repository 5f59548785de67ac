"""Where a run's figures go: always `metrics.jsonl` and `schedule.jsonl`, a progress bar, and wandb.

Only this file imports wandb. wandb never stops a run: without a key it works offline, and when it fails the run
goes on with the local files.
"""

import json
import math
import netrc
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm


@dataclass
class TrackingConfig:
    """Where figures go besides the run's own files.

    Attributes:
        wandb: "auto" is online with a key and offline without; or online, offline, disabled.
        project: wandb project.
        init_timeout_s: Longest wait for the wandb service at the start.
        schedule_every_steps: Steps between lines of `schedule.jsonl`; a line grows with ranks times slots.
    """

    wandb: str = "auto"
    project: str = "adaptiveload"
    init_timeout_s: float = 20.0
    schedule_every_steps: int = 1

    def check(self) -> None:
        """Raise ValueError for an unknown mode."""
        if self.wandb not in ("auto", "online", "offline", "disabled"):
            raise ValueError(f"tracking.wandb={self.wandb!r}: use auto, online, offline or disabled")
        if self.schedule_every_steps < 1:
            raise ValueError(f"tracking.schedule_every_steps={self.schedule_every_steps} must be at least 1")


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
        self._metrics = _open_from(run_dir / "metrics.jsonl", first_step)
        self._schedule = _open_from(run_dir / "schedule.jsonl", first_step)
        self._wandb = _start_wandb(run_dir, config, run_config)
        # With a delay its first line waits for the first step, and so comes after the start-up report.
        self._bar = tqdm(
            total=max_steps, initial=first_step, desc=run_dir.name, unit="step", dynamic_ncols=True, delay=1e-3
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the figures of `step`, keys as in docs/metrics.md."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        _write_line(self._metrics, {"step": step, **finite})
        self._to_wandb(step, lambda: metrics)
        if "train/loss" in metrics:
            self._bar.update(step + 1 - self._bar.n)
            shown = {"loss": "train/loss", "cv": "imbalance/step_time_cv", "tok/s": "perf/tokens_per_s"}
            self._bar.set_postfix({name: f"{metrics[key]:.3g}" for name, key in shown.items() if key in metrics})

    def log_schedule(self, record: dict[str, Any]) -> None:
        """Write what each rank did in each slot of a step; scripts.report draws it."""
        _write_line(self._schedule, record)

    def log_previews(self, step: int, sheet: Path, files: Sequence[Path]) -> None:
        """Show wandb a contact sheet and the clips on it; the run's folder has them already."""

        def media() -> dict[str, Any]:
            import wandb

            clips = [wandb.Video(str(path), format="mp4") for path in files if path.suffix == ".mp4"]
            return {"previews/sheet": wandb.Image(str(sheet)), **({"previews/clips": clips} if clips else {})}

        self._to_wandb(step, media)

    def _to_wandb(self, step: int, content: Callable[[], dict[str, Any]]) -> None:
        if self._wandb is None:
            return
        try:
            self._wandb.log(content(), step=step)
        except Exception as error:  # whatever wandb raises, the run is worth more
            self.message(f"wandb failed and is off from here: {error}")
            self._wandb = None

    def message(self, text: str) -> None:
        """Print a line without tearing the progress bar."""
        self._bar.write(text)

    def close(self) -> None:
        """Close the files and end the wandb run."""
        self._bar.close()
        self._metrics.close()
        self._schedule.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:
                print(f"wandb did not finish: {error}")


def _start_wandb(run_dir: Path, config: TrackingConfig, run_config: Any) -> Any:
    mode = config.wandb if config.wandb != "auto" else ("online" if _has_wandb_key() else "offline")
    if mode == "disabled":
        return None
    import wandb

    for attempt in dict.fromkeys((mode, "offline")):
        try:
            settings = wandb.Settings(init_timeout=config.init_timeout_s, console="off", silent=True)
            return wandb.init(
                project=config.project,
                name=run_dir.name,
                id=_wandb_id(run_dir),
                resume="allow",
                dir=str(run_dir),
                mode=attempt,
                config=asdict(run_config),
                settings=settings,
            )
        except Exception as error:
            print(f"wandb could not start {attempt}: {error}; figures are in {run_dir / 'metrics.jsonl'}")
    return None


def _wandb_id(run_dir: Path) -> str:
    """The run's wandb id, the same after every resume."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _open_from(path: Path, first_step: int) -> Any:
    """Open a JSONL file for appending, without the lines of `first_step` and later ones."""
    kept = []
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) < first_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(path)
    return path.open("a", buffering=1)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line torn by a crash
        return math.inf


def _write_line(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
