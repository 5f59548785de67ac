"""Launched by test_hsdp.py on four ranks: one run under several layouts, two of them from a checkpoint of another."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks, finish_ranks, start_ranks
from adaptiveload.training.ema import Ema
from adaptiveload.training.group_watch import GroupWatch, WatchConfig
from adaptiveload.training.live_step import build_model
from adaptiveload.training.run import build_run
from adaptiveload.training.stop_signals import StopSignals
from train import train

MAX_STEPS, BORDER = 6, 3
# Ranks that share a copy of the model, where ranks meet, and whose checkpoint of step BORDER it goes on from.
LAYOUTS = {
    "fsdp": (0, "slot", None),
    "hsdp": (2, "slot", None),
    "hsdp-from-fsdp": (2, "step", "fsdp"),
    "fsdp-from-hsdp": (0, "step", "hsdp"),
}


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors in host memory that are alive at once.

    Attributes:
        peak: Most of them so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                if storage.device.type == "cpu":
                    self.live[storage._cdata] = (
                        torch.multiprocessing.reductions.StorageWeakRef(storage),
                        storage.nbytes(),
                    )
        self.live = {key: each for key, each in self.live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def memory_of_start(config_path: str, ranks: Ranks) -> dict[str, float]:
    """Peak of a start, in bytes, beside what the rank holds of the model and its averages after it."""
    config = load_config(config_path, ["model.num_layers=8", "model.ffn_dim=96"])
    with PeakMemory() as memory:
        model = build_model(config, ranks)[0]
        ema = Ema(model, config.ema)
    assert ema.shadow
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    return {"peak": memory.peak, "weights": held, "whole": whole}


def main(config_path: str, output: str) -> None:
    ranks = start_ranks()
    watch = GroupWatch(ranks.rank, WatchConfig(), Path(output).parent)
    placements = {}
    for name, (shard_ranks, meet, origin) in LAYOUTS.items():
        keys = [f"name=layout-{name}", f"schedule.shard_ranks={shard_ranks}", f"schedule.meet={meet}"]
        keys += [f"max_steps={MAX_STEPS}", f"checkpoint.every_steps={BORDER}", "evaluation.max_samples=0"]
        if name.startswith("hsdp"):
            keys += ["schedule.recompute=auto", "schedule.kept_tokens=20", "schedule.most_tokens=200"]
        if origin is not None:
            path = Path(output).parent / "runs" / f"layout-{origin}" / "checkpoints" / f"step-{BORDER:08d}"
            keys.append(f"checkpoint.resume={path}")
        if name == "fsdp-from-hsdp":
            keys.append("checkpoint.every_minutes=1e-6")  # after every step, then
        run = build_run(load_config(config_path, [*keys, f"output_dir={Path(output).parent / 'runs'}"]), ranks)
        assert run.first_step == (BORDER if origin else 0)
        assert train(run, StopSignals(), watch)
        run.feed.close()
        if run.tracker is not None:
            run.tracker.close()
        parameter: nn.Parameter = next(run.model.parameters())
        placements[name] = [str(placement) for placement in parameter.placements]
    results = {"placements": placements, "memory": ranks.gather_objects(memory_of_start(config_path, ranks))}
    if ranks.is_main:
        Path(output).write_text(json.dumps(results))
    watch.stop()
    finish_ranks(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
