"""What is read of checkpoints: the one that a run goes on from, or the weights alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from adaptiveload.training.checkpoint import CheckpointConfig
from adaptiveload.training.checkpoint_files import committed, find_damage, latest, read_state
from adaptiveload.training.distributed import Ranks


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
    path = ranks.run_on_main(lambda: latest(folder))
    if path is None:
        raise ValueError(f"{folder} holds no checkpoint: train first")
    if damage := _find_damage_together(path, ranks):
        raise ValueError(f"{path} is damaged: {damage}")
    state = read_state(path, expected)
    kind = {"averaged": "ema", "last": "model"}[weights]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = {f"{kind}/{name}": parameter.detach() for name, parameter in trained.items()}
    try:
        dcp.load(tensors, checkpoint_id=path, process_group=ranks.host_group)
    except CheckpointException as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    return int(state["step"])


def find_to_resume(folder: Path, config: CheckpointConfig, ranks: Ranks) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for, every file of it read and checked, or None for a fresh start.

    A path only says where a run begins: once the run has a checkpoint of its own, it goes on from that. A damaged one
    is passed over for the one before it.

    Args:
        folder: The run's `checkpoints` folder.
        config: What is asked for.
        ranks: All of them must call this together; each reads a share of the files.

    Raises:
        ValueError: On all ranks, if "never" meets an existing checkpoint; if the path is damaged, or names an older one
            of this run, whose newer ones would then belong to another history; or if all that there are are damaged.
    """
    own = ranks.run_on_main(lambda: committed(folder))  # another node may not see a folder that was just made
    if config.resume == "never":
        if own:
            raise ValueError(f"{own[-1]} exists and checkpoint.resume is never: choose another `name`")
        return None
    path = Path(config.resume)
    if config.resume != "auto" and (not own or path.resolve() == own[-1].resolve()):
        if damage := _find_damage_together(path, ranks):
            raise ValueError(f"checkpoint.resume={path}: not a whole checkpoint: {damage}")
        return path
    if config.resume != "auto" and path.resolve().parent == folder.resolve():
        raise ValueError(
            f"checkpoint.resume={path}, but the run has gone on to {own[-1]}: remove the newer checkpoints, "
            "or start under another `name`"
        )
    for candidate in reversed(own):
        if not (damage := _find_damage_together(candidate, ranks)):
            return candidate
        if ranks.is_main:
            print(f"{candidate} is passed over, it is damaged: {damage}", flush=True)
    if own:
        raise ValueError(f"{folder}: all {len(own)} checkpoints are damaged; move them away to start anew")
    return None


def _find_damage_together(path: Path, ranks: Ranks) -> str:
    problems = ranks.gather_objects(find_damage(path, ranks.rank, ranks.world_size))
    return "; ".join(dict.fromkeys(problem for each in problems for problem in each))
