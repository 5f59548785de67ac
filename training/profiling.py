"""`profile.steps`: a trace of what host and GPU do in a few steps, and on CUDA of who holds memory.

Steps under the profiler take longer, on every rank, since the others wait: their times are in no figure and no refit.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from adaptiveload.training.distributed import Ranks
from adaptiveload.training.step_timer import StepTimer

# A step of Wan 1.3B is some 10 MiB of compressed trace, and ten times that in memory.
_MOST_STEPS = 10
# Of allocations and frees with their stacks, some KB each in memory; the last ones are kept.
_MOST_ALLOCATIONS = 50_000


@dataclass
class ProfileConfig:
    """Steps to look into with a profiler. Files are in `RUN/profile`, see docs/metrics.md.

    Attributes:
        steps: First and last step of a trace, counted from 0, such as [10, 12], at most 10 steps; without them there is
            none.
        ranks: Ranks that write theirs.
        max_mib: A file that would be larger is not kept.
    """

    steps: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [0])
    max_mib: float = 500.0

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        if self.steps and not (len(self.steps) == 2 and 0 <= self.steps[1] - self.steps[0] < _MOST_STEPS):
            raise ValueError(
                f"profile.steps={self.steps}: give the first and the last of at most {_MOST_STEPS} steps, such as "
                "[10, 12]; a trace grows by tens of MiB a step"
            )
        if self.steps and not self.ranks:
            raise ValueError(f"profile.steps={self.steps}, but profile.ranks=[] names no rank to write a trace")
        if min(self.steps, default=0) < 0 or min(self.ranks, default=0) < 0 or not self.max_mib > 0:
            raise ValueError(
                f"profile: steps={self.steps} and ranks={self.ranks} must not be negative, max_mib={self.max_mib} must "
                "be positive"
            )


class Profiler:
    """Profiles `config.steps` where this rank is one of `config.ranks`. Whatever fails in it, the run goes on.

    In a trace `step N` and `micro_batch G` are the host's, `busy` what `StepTimer` times. `busy_s` at its top level has
    what it measured, by step.

    Args:
        config: Which steps and ranks.
        ranks: All of them call `before_step` and `after_step`.
        run_dir: Folder of the run.
        timer: Marks its spans while the profiler runs.
        say: Takes a line for the log.

    Raises:
        ValueError: If a rank of `config.ranks` does not exist.
    """

    def __init__(
        self, config: ProfileConfig, ranks: Ranks, run_dir: Path, timer: StepTimer, say: Callable[[str], None]
    ) -> None:
        if config.steps and max(config.ranks, default=0) >= ranks.world_size:
            raise ValueError(f"profile.ranks={config.ranks}: this run has {ranks.world_size} ranks, counted from 0")
        self.config, self.ranks, self.timer, self.say = config, ranks, timer, say
        self.folder = run_dir / "profile"
        self._profile: profile | None = None
        self._step_mark: record_function | None = None
        self._busy_s: dict[int, list[float]] = {}

    def is_on(self, step: int) -> bool:
        """Whether a rank profiles `step`; the same on all ranks."""
        return bool(self.config.steps) and self.config.steps[0] <= step <= self.config.steps[1]

    def before_step(self, step: int) -> None:
        """Start with the first step to be profiled. Collective."""
        if not self.is_on(step):
            return
        if self._profile is None and not self._busy_s:
            if self.ranks.rank in self.config.ranks:
                self._try("start", self._start)
            self.ranks.barrier()  # starting takes seconds, which are no part of the step
        if self._profile is not None:
            self._step_mark = record_function(f"step {step}")
            self._step_mark.__enter__()

    def after_step(self, step: int, busy_s: list[float]) -> None:
        """Write the files after the last step to be profiled. Collective.

        Args:
            step: Its number.
            busy_s: What the timer measured of it.
        """
        if not self.is_on(step):
            return
        self._busy_s[step] = busy_s
        self._end_step()
        if step == self.config.steps[1]:
            self.close()
            self.ranks.barrier()

    def close(self) -> None:
        """Write what there is, if the run ends within the steps to be profiled."""
        if self._profile is not None:
            self._end_step()
            self._try("write its files", self._write)
            self._profile = None
            self.timer.is_traced = False

    def _end_step(self) -> None:
        if self._step_mark is not None:
            self._step_mark.__exit__(None, None, None)
            self._step_mark = None

    def _try(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # of Kineto, CUPTI or the disk: the run is worth more
            self.say(f"the profiler of rank {self.ranks.rank} could not {what}: {error}; the run goes on")
            if self.ranks.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        on_gpu = self.ranks.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities):  # the first start of a process loads libraries
            torch.zeros(1, device=self.ranks.device).add_(1)
        if on_gpu:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS)
            torch.cuda.synchronize()
        started = profile(activities=activities)
        started.start()
        self._profile = started
        self.timer.is_traced = True

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.add_metadata_json("busy_s", json.dumps(self._busy_s))
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self._profile.stop()
        steps = "-".join(f"{step:08d}" for step in self.config.steps)
        name = f"steps_{steps}_rank_{self.ranks.rank:03d}"
        trace, raw = self.folder / f"{name}.trace.json.gz", self.folder / f".{name}.trace.json"
        try:
            self._profile.export_chrome_trace(str(raw))
            with raw.open("rb") as plain, gzip.open(trace, "wb", compresslevel=3) as packed:
                shutil.copyfileobj(plain, packed, 2**20)
        finally:
            raw.unlink(missing_ok=True)
        self._keep(trace, "open it at ui.perfetto.dev")
        if self.ranks.device.type == "cuda":
            snapshot = self.folder / f"{name}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._keep(snapshot, "open it at pytorch.org/memory_viz")

    def _keep(self, path: Path, advice: str) -> None:
        mib = path.stat().st_size / 2**20
        if mib <= self.config.max_mib:
            self.say(f"profile: {path}, {mib:.1f} MiB; {advice}")
        else:
            path.unlink()
            self.say(
                f"profile: {path.name} had {mib:.2g} MiB and is not kept (profile.max_mib={self.config.max_mib:g})"
            )
