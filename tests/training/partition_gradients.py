"""Launched by test_estimator.py on several ranks: gradients of one step under several partitions of its samples."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import finish_ranks, start_ranks
from adaptiveload.training.feed import MicroBatch, planned_sample
from adaptiveload.training.group_watch import GroupWatch
from adaptiveload.training.metrics import RankMeasurement, gather_measurements
from adaptiveload.training.run import Run, build_run
from train import forward_backward


def partitions(plan: StepPlan, ranks: int) -> dict[str, tuple]:
    """Ways to deal the step's samples to ranks and slots.

    "lopsided" leaves a filler on every rank but one; "uneven" gives rank 0 three micro-batches and the others one, as
    ranks may have that meet once a step.
    """
    n = plan.num_samples
    everyone = list(range(n))
    contiguous = [tuple(map(int, part)) for part in np.array_split(everyone, 2 * ranks)]
    interleaved = [tuple(everyone[i :: 3 * ranks]) for i in range(3 * ranks)]
    lopsided = [tuple(everyone[: n // 2]), *[()] * (ranks - 1), tuple(everyone[n // 2 :]), *[()] * (ranks - 1)]
    rest = [tuple(map(int, part)) for part in np.array_split(everyone[6:], max(ranks - 1, 1))]
    uneven = [(0, 1), *(rest if ranks > 1 else []), (2, 3), *[None] * (ranks - 1), (4, 5), *[None] * (ranks - 1)]
    if ranks == 1:
        uneven[0] = (0, 1, *everyone[6:])
    # Case c40's dealings: nearly all on one rank, and three micro-batches of 1, 5 and 6.
    eleven_and_one = [tuple(everyone[:11]), (11,)]
    one_five_six = [(0,), tuple(everyone[1:6]), tuple(everyone[6:])]
    one_five_six += [()] * (-len(one_five_six) % ranks)
    return {
        name: tuple(tuple(parts[g * ranks : (g + 1) * ranks]) for g in range(len(parts) // ranks))
        for name, parts in (
            ("contiguous", contiguous),
            ("interleaved", interleaved),
            ("lopsided", lopsided),
            ("uneven", uneven),
            ("eleven and one", eleven_and_one),
            ("one, five and six", one_five_six),
        )
    }


def gradient(run: Run, watch: GroupWatch, plan: StepPlan) -> tuple[torch.Tensor, float]:
    """Whole gradient of `plan`, float32, and the loss that is logged, on every rank."""
    batches: list[MicroBatch] = []
    for indices in plan.micro_batches(run.ranks.rank):
        planned = tuple(planned_sample(plan, run.schedule.corpus, i) for i in indices)
        batches.append(run.feed.dataset[planned])
    run.model.zero_grad()
    losses, _ = forward_backward(run, watch, plan, iter(batches))  # what train.py runs
    mine = RankMeasurement(sum(float(loss.sum()) for loss, _ in losses), 1.0, 0.0, 0.0, 0, [])
    loss = gather_measurements(run.ranks, plan, mine).loss_sum / plan.normalizer
    return torch.cat([parameter.grad.full_tensor().flatten() for parameter in run.model.parameters()]), loss


def main(config_path: str, output: str) -> None:
    ranks = start_ranks()
    config = load_config(config_path, [f"name=partitions-{ranks.world_size}", "schedule.loss_weight_exponent=0.5"])
    run = build_run(config, ranks)
    watch = GroupWatch(ranks.rank, config.watch, config.run_dir)
    # A fresh model's head is zero, which would leave most gradients zero.
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name.startswith("proj_out"):
                parameter.to_local().fill_(0.05)
    plan = run.schedule.policy.plan(0)
    found = {}
    for name, slots in partitions(plan, ranks.world_size).items():
        for meet in ("slot", "step") if name != "uneven" else ("step",):
            shape = (len(slots), ranks.world_size)
            dealt = dataclasses.replace(
                plan,
                slots=slots,
                meet=meet,
                recompute="none",
                recomputed=np.zeros((len(slots), len(slots[0])), np.int64),
                costs_us=np.ones(shape, np.int64),
                num_tokens=np.ones(shape, np.int64),
            )
            found[f"{name}/{meet}"] = gradient(run, watch, dealt)
    if ranks.is_main:
        torch.save(found, Path(output))
    if run.tracker is not None:
        run.tracker.close()
    watch.stop()
    finish_ranks(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
