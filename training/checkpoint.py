"""Sharded checkpoints: copied at a step's border, written by all ranks while training goes on, committed by a rename.

A folder `checkpoints/step-00000100` holds the shards of torch.distributed.checkpoint, `state.json` and the checksums of
all files; it can be resumed on any number of ranks. A save that was cut leaves a `.partial` folder, which nothing
reads.
"""

import contextlib
import json
import math
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from adaptiveload.training.checkpoint_files import (
    SummedWriter,
    commit,
    committed,
    latest,
    read_state,
    remove,
    step_of,
)
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.ema import Ema
from adaptiveload.training.staging import HostCopy

# A save that waits longer for the one before is worth a line.
_LONG_WAIT_S = 1.0
# Longest time that a rank which has failed stays for the sake of a save. If others have gone, it ends with them.
_LEAVE_S = 30.0
_MOMENTS = ("exp_avg", "exp_avg_sq")


class SaveError(RuntimeError):
    """A checkpoint could not be saved, for a reason outside the program; raised on all ranks alike."""


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that was committed.

    Attributes:
        path: Its folder.
        held_s: Seconds that training was held: by the save before, if that was still under way, and by the copy.
        background_s: Seconds from then until it was committed, while training went on.
    """

    path: Path
    held_s: float
    background_s: float

    def figures(self) -> dict[str, float]:
        """By metric key."""
        return {"checkpoint/held_s": self.held_s, "checkpoint/background_s": self.background_s}

    def __str__(self) -> str:
        return f"{self.path} is saved, held training {self.held_s:.2f} s, took {self.background_s:.1f} s beside it"


@dataclass
class CheckpointConfig:
    """When to save and where to resume from.

    Attributes:
        every_steps: Steps between saves, 0 for none by steps. A run that saves at all also saves its last step; one
            without saves leaves figures alone.
        every_minutes: Save as soon as the last save is so many minutes ago, by the clock of rank 0, 0 for none by time.
        keep: Newest checkpoints kept.
        keep_every: Those of every so many steps are kept too, for good; a multiple of `every_steps`, 0 for none.
        resume: "auto" goes on from the run's own newest undamaged checkpoint if there is one; "never" refuses a
            folder that has one; else the path of a checkpoint to begin from while the run has none of its own.
    """

    every_steps: int = 100
    every_minutes: float = 0.0
    keep: int = 2
    keep_every: int = 0
    resume: str = "auto"

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        if self.every_steps < 0 or self.keep < 1:
            raise ValueError(
                f"checkpoint.every_steps={self.every_steps}, checkpoint.keep={self.keep} must be at least 0 and 1"
            )
        if not 0 <= self.every_minutes < math.inf:
            raise ValueError(f"checkpoint.every_minutes={self.every_minutes} must be 0 or more, and finite")
        if self.keep_every < 0 or (self.keep_every and (not self.every_steps or self.keep_every % self.every_steps)):
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} must be a multiple of checkpoint.every_steps="
                f"{self.every_steps}, or 0"
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is saved."""
        return self.every_steps > 0 or self.every_minutes > 0

    def is_due(self, steps_done: int, max_steps: int) -> bool:
        """Whether to save after so many steps of `max_steps`, whatever the time."""
        by_steps = self.every_steps > 0 and steps_done % self.every_steps == 0
        return self.is_on and (by_steps or steps_done == max_steps)


class Checkpointer:
    """Saves and restores what is trained, its optimizer and EMA by parameter name, and a small dict beside them.

    A save copies all of it to host memory (16 bytes for each trained parameter of the rank's shards, taken once) and
    writes the copy in a thread. One save at a time is under way; its error, the same on all ranks, waits for `finish`.

    Args:
        folder: The run's `checkpoints` folder.
        config: When to save, how many to keep.
        ranks: All of them must make one together, and call `save`, `finish` and `load` together.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        ranks: Ranks,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: Ema,
    ) -> None:
        self.folder, self.config, self.ranks = folder, config, ranks
        self.model, self.optimizer, self.ema = model, optimizer, ema
        # The thread's collectives have a group of their own: in one with training's the two would mix.
        self._background = replace(ranks, host_group=dist.new_group(backend="gloo"))
        self._copy: HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._reports: list[SaveReport] = []
        self._last_save = time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """Whether `checkpoint.every_minutes` have gone by on this rank since the last save or the start."""
        minutes = self.config.every_minutes
        return minutes > 0 and time.monotonic() - self._last_save >= 60 * minutes

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way has failed. Then all ranks should `finish`."""
        return self._error is not None

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Copy what is trained after `step` completed steps; a thread writes and commits it, and removes old ones.

        Returns:
            Where it will be.

        Raises:
            SaveError: On all ranks, if the disk did not take the save before. What was committed before stays.
        """
        began = time.perf_counter()
        self.finish()
        waited_s = time.perf_counter() - began
        if waited_s > _LONG_WAIT_S and self.ranks.is_main:
            print(
                f"the checkpoint of step {step} waited {waited_s:.1f} s for the one before: the disk takes longer than "
                "there is between saves",
                flush=True,
            )
        tensors = self._tensors()
        if self._copy is None:
            self._copy = HostCopy(tensors, self.ranks.device)
        self._copy.take(tensors)
        self._last_save = time.monotonic()
        # `state` may change while the thread works.
        path = self.folder / f"step-{step:08d}"
        arguments = (path, json.dumps({"step": step, **state}, indent=1), time.perf_counter() - began)
        self._thread = threading.Thread(target=self._work, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        return path

    def finish(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveError: On all ranks, if the disk did not take it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def leave(self) -> None:
        """Before this rank ends for another reason: give the save under way some time, if the other ranks still do."""
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def take_reports(self) -> list[SaveReport]:
        """What this rank knows of saves that were committed since the last call."""
        return [self._reports.pop(0) for _ in range(len(self._reports))]

    def _work(self, target: Path, state: str, held_s: float) -> None:
        began = time.perf_counter()
        try:
            if self.ranks.device.type == "cuda":
                torch.cuda.set_device(self.ranks.device)  # a thread begins with the first
            assert self._copy is not None
            held_s += self._copy.wait()
            self._write(target, state, self._copy.tensors)
        except Exception as error:
            self._error = error
        else:
            self._reports.append(SaveReport(target, held_s, time.perf_counter() - began))

    def _write(self, target: Path, state: str, tensors: dict[str, Tensor]) -> None:
        partial = target.with_suffix(".partial")
        writer, ranks = SummedWriter(partial), self._background
        try:
            ranks.run_on_main(lambda: self._prepare(partial))
            dcp.save(tensors, storage_writer=writer, process_group=ranks.host_group)
            sums = {name: each for written in ranks.gather_objects(writer.sums) for name, each in written.items()}
            ranks.run_on_main(lambda: commit(partial, target, state, sums))
        except (OSError, CheckpointException) as error:
            raise SaveError(self._explain_failed_save(step_of(target), partial, error)) from error
        if ranks.is_main:
            for old in committed(self.folder)[: -self.config.keep]:
                if not self.config.keep_every or step_of(old) % self.config.keep_every:
                    remove(old)
        ranks.barrier()

    def check_room(self) -> None:
        """Take the host memory of saves, and see that the disk has room for a checkpoint beside those that are there.

        An old one goes after the new one is whole, so there is one more than `checkpoint.keep` for a while: rank 0 says
        so where there is no room for that.

        Raises:
            ValueError: On all ranks, if there is not room for one.
            RuntimeError: If the system does not give the host memory.
        """
        self._copy = HostCopy(self._tensors(), self.ranks.device)
        each = self._num_bytes()
        self.ranks.run_on_main(lambda: self._check_disk(each))

    def _check_disk(self, each: int) -> None:
        """See that there is room for a checkpoint of `each` bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free, existing = shutil.disk_usage(self.folder).free, len(committed(self.folder))
        if free < each:
            raise ValueError(
                f"{self.folder}: a checkpoint takes {each / 1e9:.3g} GB, {free / 1e9:.3g} GB are free: make room, or "
                "set output_dir to another disk or checkpoint.every_steps=0 and every_minutes=0, which save nothing"
            )
        needed = max(1, self.config.keep + 1 - existing) * each
        if free < needed:
            print(
                f"WARNING: {self.folder}: {needed / 1e9:.3g} GB more are needed while checkpoint.keep="
                f"{self.config.keep} checkpoints and a new one are there, {free / 1e9:.3g} GB are free: make room, "
                "keep fewer, or set output_dir to another disk",
                flush=True,
            )

    def _prepare(self, partial: Path) -> None:
        for torso in self.folder.glob("step-*.partial"):  # saves that were cut
            remove(torso)
        partial.mkdir(parents=True)

    def _explain_failed_save(self, step: int, partial: Path, error: BaseException) -> str:
        """Give the disk back what the failed save took, and say what happened."""
        reason, free, newest = str(error), 0, None
        if isinstance(error, CheckpointException):
            reason = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        if self.ranks.is_main:
            with contextlib.suppress(OSError):  # then the folder itself is gone
                free = shutil.disk_usage(self.folder).free
            if partial.exists():
                remove(partial)
            newest = latest(self.folder)
        free, newest = self._background.broadcast_object((free, newest))
        kept = f"the last good checkpoint is {newest}" if newest else "there is no earlier checkpoint"
        return (
            f"the checkpoint of step {step} could not be saved in {self.folder}: {reason}. Its "
            f"tensors take {self._num_bytes() / 1e9:.3g} GB, {free / 1e9:.3g} GB were free at the end; {kept}"
        )

    def _num_bytes(self) -> int:
        """Bytes of a checkpoint's tensors: parameters, averages and two moments, all of them fp32."""
        parameters = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters) * (2 + len(_MOMENTS))

    def load(self, path: Path, expected: dict[str, Any]) -> dict[str, Any]:
        """Restore model, optimizer and EMA from `path`; return the dict that was saved beside them.

        Args:
            path: A committed checkpoint.
            expected: Keys of the saved dict whose values must be these, and what each of them means for the user.

        Raises:
            ValueError: If the folder is no whole checkpoint, or was made under another data set, seed or schedule.
        """
        state = read_state(path, expected)
        # Loads in place: these are the very tensors of model, optimizer and EMA.
        try:
            dcp.load(self._tensors(), checkpoint_id=path, process_group=self.ranks.host_group)
        except CheckpointException as error:
            raise ValueError(f"{path} cannot be loaded: {error}") from error
        return state

    def _tensors(self) -> dict[str, Tensor]:
        """All that changes in training; frozen weights are read again from where the run took them."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            tensors[f"model/{name}"] = parameter.detach()
            tensors[f"ema/{name}"] = self.ema.shadow[name]
            moments = self.optimizer.state[parameter]
            if not moments:  # before the first step AdamW has none yet
                moments["step"] = torch.zeros((), dtype=torch.float32, device=_step_device(self.optimizer, parameter))
                moments |= {key: torch.zeros_like(parameter) for key in _MOMENTS}
            tensors |= {f"optimizer/{name}/{key}": moments[key] for key in (*_MOMENTS, "step")}
        return tensors


def _step_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    # AdamW keeps its step count on the host unless it is fused.
    return parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
