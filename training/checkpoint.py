"""Sharded checkpoints: written by all ranks, committed by a rename, resumed on any number of ranks.

A folder `checkpoints/step-000100` holds the shards of torch.distributed.checkpoint and `state.json`; `latest` names
the newest folder that was committed. A save that was cut leaves a `.partial` folder, which nothing reads.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from adaptiveload.training.distributed import Ranks
from adaptiveload.training.ema import Ema

LATEST_NAME = "latest"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class CheckpointConfig:
    """When to save and where to resume from.

    Attributes:
        every_steps: Steps between saves; the last step is always saved. 0 saves nothing: such a run leaves figures.
        keep: Newest checkpoints kept.
        resume: "auto" goes on from the run's own latest checkpoint if there is one; "never" refuses a folder that
            has one; else the path of a checkpoint to begin from while the run has none of its own.
    """

    every_steps: int = 100
    keep: int = 2
    resume: str = "auto"

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        if self.every_steps < 0 or self.keep < 1:
            raise ValueError(
                f"checkpoint.every_steps={self.every_steps}, checkpoint.keep={self.keep} must be at least 0 and 1"
            )

    def is_due(self, steps_done: int, max_steps: int) -> bool:
        """Whether to save after so many steps of `max_steps`."""
        return self.every_steps > 0 and (steps_done == max_steps or steps_done % self.every_steps == 0)


class Checkpointer:
    """Saves and restores what is trained, its optimizer and EMA by parameter name, and a small dict beside them.

    Args:
        folder: The run's `checkpoints` folder.
        config: When to save, how many to keep.
        ranks: All of them must call `save` and `load` together.
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

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint of `step` completed steps, commit it, and drop those beyond `keep`."""
        target = self.folder / f"step-{step:08d}"
        partial = target.with_suffix(".partial")
        if self.ranks.is_main:
            for torso in self.folder.glob("step-*.partial"):  # saves that were cut
                shutil.rmtree(torso)
            partial.mkdir(parents=True)
        self.ranks.barrier()
        dcp.save(self._tensors(), checkpoint_id=partial, process_group=self.ranks.host_group)
        if self.ranks.is_main:
            (partial / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
            _sync_files(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            _write_latest(self.folder, target.name)
            for old in committed(self.folder)[: -self.config.keep]:
                shutil.rmtree(old)
        self.ranks.barrier()
        return target

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

    @staticmethod
    def to_resume(folder: Path, config: CheckpointConfig) -> Path | None:
        """The checkpoint that `checkpoint.resume` asks for, or None for a fresh start.

        A path only says where a run begins: once the run has a checkpoint of its own, it goes on from that.

        Raises:
            ValueError: If "never" meets an existing checkpoint, or the path names an older one of this run, whose
                newer ones would then belong to another history.
        """
        newest = latest(folder)
        if config.resume == "auto":
            return newest
        if config.resume == "never":
            if newest is not None:
                raise ValueError(f"{newest} exists and checkpoint.resume is never: choose another `name`")
            return None
        path = Path(config.resume)
        if newest is None or path.resolve() == newest.resolve():
            return path
        if path.resolve().parent == folder.resolve():
            raise ValueError(
                f"checkpoint.resume={path}, but the run has gone on to {newest}: remove the newer checkpoints, "
                "or start under another `name`"
            )
        return newest

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


def load_weights(model: nn.Module, folder: Path, weights: str, ranks: Ranks, expected: Mapping[str, Any]) -> int:
    """Fill `model` from the newest checkpoint in `folder`, each rank its shards; returns the steps it was trained for.

    Args:
        model: Sharded, as a resumed run has it.
        folder: The run's `checkpoints` folder.
        weights: "averaged" or "last".
        ranks: All of them, together.
        expected: As for `Checkpointer.load`.

    Raises:
        ValueError: If there is no checkpoint, or it cannot be loaded, or was made under other values than `expected`.
    """
    path = latest(folder)
    if path is None:
        raise ValueError(f"{folder} holds no checkpoint: train first")
    state = read_state(path, expected)
    kind = {"averaged": "ema", "last": "model"}[weights]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = {f"{kind}/{name}": parameter.detach() for name, parameter in trained.items()}
    try:
        dcp.load(tensors, checkpoint_id=path, process_group=ranks.host_group)
    except CheckpointException as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    return int(state["step"])


def latest(folder: Path) -> Path | None:
    """The newest committed checkpoint in `folder`: the one that `latest` names, or the last folder if it is torn."""
    pointer = folder / LATEST_NAME
    if pointer.is_file():
        named = folder / pointer.read_text().strip()
        if (named / "state.json").is_file():
            return named
    whole = committed(folder)
    return whole[-1] if whole else None


def committed(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and (path / "state.json").is_file())


def read_state(path: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The dict saved beside a checkpoint's tensors.

    Args:
        path: A committed checkpoint.
        expected: Keys of the dict whose values must be these.

    Raises:
        ValueError: If `path` is no whole checkpoint, or was made under other values than `expected`.
    """
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {error}") from error
    for key, value in (expected or {}).items():
        if state.get(key) != value:
            raise ValueError(
                f"{path}: made with {key}={state.get(key)!r}, this run has {value!r}; what goes on from a checkpoint "
                "must keep it, or start anew under another `name`"
            )
    return state


def _step_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    # AdamW keeps its step count on the host unless it is fused.
    return parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")


def _write_latest(folder: Path, name: str) -> None:
    temporary = folder / f".{LATEST_NAME}.tmp"
    temporary.write_text(name + "\n")
    temporary.replace(folder / LATEST_NAME)


def _sync_files(folder: Path) -> None:
    """Have the disk hold every file before the rename that makes them count."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
