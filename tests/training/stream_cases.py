"""Launched by test_stream.py on several ranks: epochs of streams, without a model. Writes what every rank got."""

import json
import sys
from pathlib import Path
from typing import Any

from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.scheduling.cost import TwoTermCost
from adaptiveload.scheduling.policies import ScheduleConfig
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.distributed import Ranks, start_ranks
from adaptiveload.training.feed import DataConfig
from adaptiveload.training.stream import StreamFeed


def make_feed(path: str, policy: str, ranks: Ranks, saved: dict[str, Any] | None, num_workers: int) -> StreamFeed:
    data = DataConfig(mode="stream", path=path, held_out_share=0, num_workers=num_workers)
    schedule = ScheduleConfig(policy, memory_limit_tokens=128, slots_per_step=2, cost_exponent=1.45)
    cost = TwoTermCost(0.0, 100.0, 1.0, 1.0, 0.01)
    return StreamFeed(data, schedule, ranks, saved, cost, "step", LatentGeometry(), FlowMatchingConfig(), 16, 8, seed=3)


def run(feed: StreamFeed, epochs: int, stop_at: int | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Steps until `epochs` epochs are over, or `stop_at` steps; the state after each step is `saved_state`'s."""
    steps: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    while stop_at is None or len(steps) < stop_at:
        plan, micro_batches = feed.next_step()
        if plan.epochs[0] >= epochs:
            break
        batches = list(micro_batches)
        steps.append(
            {
                "epoch": int(plan.epochs[0]),
                "digest": plan.digest,
                "num_slots": plan.num_slots,
                "batches": [batch.trained for batch in batches],
                "tokens": [int(batch.packed.num_tokens) for batch in batches],
                "lost": [loss for batch in batches for loss in batch.lost],
                "costs_us": plan.costs_us.tolist(),
            }
        )
        state = {**feed.saved_state(plan), "step": plan.step + 1}
    return steps, state


def main(root: str, output: str) -> None:
    ranks = start_ranks()
    results: dict[str, Any] = {}
    for folder in sorted(Path(root).iterdir()):
        for policy in ("dual_constraint", "equal_token", "local"):
            # Reading in another process changes nothing; one is started for each epoch.
            num_workers = int(folder.name == "plain" and policy == "local")
            feed = make_feed(str(folder), policy, ranks, None, num_workers)
            results[f"{folder.name}/{policy}"] = run(feed, epochs=3)[0]
            feed.close()
    # Stopped in mid-epoch and gone on with: the state alone crosses.
    for policy in ("dual_constraint", "local"):
        path = str(Path(root) / "plain")
        first, state = run(make_feed(path, policy, ranks, None, 0), epochs=2, stop_at=2)
        state = json.loads(json.dumps(state))
        rest, _ = run(make_feed(path, policy, ranks, state, 0), epochs=2)
        results[f"resumed/{policy}"] = [*first, *rest]
        if ranks.is_main:
            (Path(output) / f"state-{policy}-{ranks.world_size}.json").write_text(json.dumps(state))
    # Gone on with after another number of ranks stopped.
    for path in sorted(Path(output).glob("state-*-2.json")):
        if ranks.world_size != 2:
            policy = path.name.split("-")[1]
            feed = make_feed(str(Path(root) / "plain"), policy, ranks, json.loads(path.read_text()), 0)
            results[f"other-ranks/{policy}"] = run(feed, epochs=2)[0]
    (Path(output) / f"rank-{ranks.rank}-of-{ranks.world_size}.json").write_text(json.dumps(results))
    ranks.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
