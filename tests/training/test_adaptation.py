"""What a refit says for the log, and that a resumed run decides as the whole one: rank 0 of four ranks."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from adaptiveload.scheduling.cost import TwoTermCost
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import ScheduleConfig, build_policy
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory, ScheduleUpdate
from adaptiveload.training.adaptation import Adaptation
from adaptiveload.training.cost import CostConfig
from adaptiveload.training.distributed import Ranks

TRUTH = CostFile.read("configs/costs/wan_1_3b.yaml").law("two_term")
TABLE = SampleTable.from_mix("configs/mixes/mixed.yaml", 2000, seed=0)
LENGTHS = (4, 18, 64)
SPEED = np.array([1, 1, 0.7, 1])  # noise of 2 % makes it 0.71


def adaptation_of(ranks: Ranks, updates: list[ScheduleUpdate]) -> Adaptation:
    settings = ScheduleConfig(samples_per_step=28 * 4, memory_limit_tokens=105_600, rank_speed="auto")
    history = CostHistory(TRUTH, updates)
    order = EndlessOrder(np.arange(len(TABLE)), 0)
    policy = build_policy(settings, TABLE, order, history, 4, "slot")
    schedule = SimpleNamespace(table=TABLE, order=order, policy=policy, meet="slot", settings=settings, history=history)
    return Adaptation(CostConfig(), schedule, TRUTH, replace(ranks, world_size=4), plans_ahead=2)


def run_steps(adaptation: Adaptation, steps: range) -> list[str]:
    """What it says of `steps`, whose ranks run at `SPEED`."""
    lines = []
    for step in steps:
        plan = adaptation.schedule.policy.plan(step)
        speed = adaptation.schedule.history.speed_at(step, 4)
        true_us = plan.costs_us if speed is None else plan.costs_us * speed / 1000
        noise = 1 + 0.02 * np.random.default_rng(step).standard_normal(true_us.shape)
        lines += adaptation.after_step(plan, true_us * noise / SPEED / 1e6)
    return lines


def test_a_resumed_run_finds_the_slow_rank_when_the_whole_one_does(ranks: Ranks) -> None:
    """At step 5 the rank was slow once and at 10 twice, after which nothing changes: in each the state is another."""
    whole = adaptation_of(ranks, [])
    lines = run_steps(whole, range(20))
    assert [line for line in lines if "rank" in line] == [
        "rank 2 runs at 71% of the others' speed and gets as much less work"
    ]
    for stop in (5, 7, 10, 15):
        first = adaptation_of(ranks, [])
        said = run_steps(first, range(stop))
        state = json.loads(json.dumps(first.state()))
        resumed = adaptation_of(ranks, [ScheduleUpdate.from_json(record) for record in state["updates"]])
        resumed.load(state)
        said += run_steps(resumed, range(stop, 20))
        assert said == lines
        assert resumed.state() == whole.state()


def test_other_ranks_take_over_nothing_that_tells_who_is_slow(ranks: Ranks) -> None:
    first = adaptation_of(ranks, [])
    run_steps(first, range(10))
    state = first.state() | {"speed": first.state()["speed"] * 2}
    resumed = adaptation_of(ranks, [])
    resumed.load(state)
    assert resumed.speed.tolist() == [1.0] * 4
    assert not resumed.online.observations


def test_a_checkpoint_without_the_count_of_slow_refits_keeps_a_slow_rank_slow(ranks: Ranks) -> None:
    first = adaptation_of(ranks, [])
    run_steps(first, range(10))
    state = first.state()
    del state["slow_refits"]
    resumed = adaptation_of(ranks, [ScheduleUpdate.from_json(record) for record in state["updates"]])
    resumed.load(state)
    assert run_steps(resumed, range(10, 20)) == []
    assert resumed.speed[2] < 0.75


def adaptation_after(seconds_of_a_token: float, fixed_s: float) -> tuple[dict, list[str]]:
    """The update of a refit, and its lines, once micro-batches of an H200's prior have taken so long."""
    schedule = SimpleNamespace(
        table=SimpleNamespace(computed_tokens=lambda: np.array(LENGTHS)),
        settings=SimpleNamespace(rank_speed="off", policy="balanced"),
        policy=None,
        history=SimpleNamespace(updates=[]),
    )
    law = TwoTermCost(launch_floor_us=0.0, a_us=1e4, c0_us=1.0, b1_us=0.01, b2_us=0.0)
    adaptation = Adaptation(CostConfig(), schedule, law, SimpleNamespace(world_size=1), plans_ahead=0)
    for number in range(60):
        length, count = LENGTHS[number % len(LENGTHS)], 1 + number % 4
        adaptation.online.observe(0, fixed_s + count * length * seconds_of_a_token, Counter({length: count}), 0.0)
    return adaptation._refit(10)


def test_a_refit_is_told_whichever_part_of_the_law_has_moved() -> None:
    """On a busy machine a toy's micro-batches all take as long: all is in the fixed part, and tokens cost nothing."""
    for token_s, fixed_s in ((1e-3, 1e-4), (0.0, 0.04)):
        update, lines = adaptation_after(token_s, fixed_s)
        assert len(lines) == 1
        assert lines[0].startswith("cost law from step 10: prices x ")
    assert max(update["cost"]["prices_us"]) == 1
    assert max(update["cost"]["launch_floor_us"], update["cost"]["a_us"]) > 30_000
