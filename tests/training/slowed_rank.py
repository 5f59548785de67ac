"""Launched by test_stragglers.py on two ranks: two runs of 20 steps, in which rank 1 computes, then reads, slowly."""

import sys
import time
from pathlib import Path

from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import finish_ranks, start_ranks
from adaptiveload.training.group_watch import GroupWatch
from adaptiveload.training.run import build_run
from adaptiveload.training.stop_signals import StopSignals
from train import train

# In each block of each micro-batch, and before each sample: some times what these take, and more than ranks lose to
# each other where they share their cores (some 50 ms a step; with 0.01 in blocks rank 0 was slower in 2 of 20).
BLOCK_S, SAMPLE_S = 0.04, 0.02


def main(config_path: str, folder: str) -> None:
    ranks = start_ranks()
    for slow in ("work", "data"):
        keys = (f"output_dir={folder}/runs", f"name={slow}", "max_steps=20", "checkpoint.every_steps=0")
        run = build_run(load_config(config_path, [*keys, "evaluation.max_samples=0"]), ranks)
        if ranks.rank == 1 and slow == "work":
            for block in run.model.fsdp_units()[1]:
                block.ffn.register_forward_pre_hook(lambda *_: time.sleep(BLOCK_S))
        elif ranks.rank == 1:
            read = run.feed.dataset.reader.read
            run.feed.dataset.reader.read = lambda place, read=read: (time.sleep(SAMPLE_S), read(place))[1]
        said: list[str] = []
        if run.tracker is not None:
            run.tracker.message = said.append
        watch = GroupWatch(ranks.rank, run.config.watch, Path(folder))
        assert train(run, StopSignals(), watch)
        watch.stop()
        run.feed.close()
        if run.tracker is not None:
            run.tracker.close()
            (Path(folder) / slow).write_text("\n".join(said))
    finish_ranks(ranks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
