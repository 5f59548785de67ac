"""Prices, speeds and batch sizes that change at a step: plans before it stay, nothing is lost or run twice."""

import json
from dataclasses import replace

import numpy as np
import pytest

from adaptiveload.scheduling.cost import TableCost, TwoTermCost
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import POLICIES, ScheduleConfig, build_policy, paper_batch_sizes
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory, ScheduleUpdate

COST = CostFile.read("configs/costs/wan_1_3b.yaml").law("two_term")
OTHER = replace(COST, b2_us=3 * COST.b2_us)
TABLE = SampleTable.from_mix("configs/mixes/mixed.yaml", 1500, seed=0)
ORDER = EndlessOrder(np.arange(1500), seed=0)
RANKS = 4


def policy_with(name, updates):
    config = ScheduleConfig(policy=name, samples_per_step=60, memory_limit_tokens=105_600, slots_per_step=2)
    return build_policy(config, TABLE, ORDER, CostHistory(COST, list(updates)), RANKS, "slot")


def batch_sizes(cost, limit=105_600):
    config = ScheduleConfig(policy="dual_constraint", memory_limit_tokens=limit)
    return tuple(paper_batch_sizes(config, TABLE, ORDER, cost, RANKS, "slot").tolist())


def updates():
    table = TableCost.of(OTHER, TABLE.num_tokens)
    return [
        ScheduleUpdate(5, table, (1000, 700, 1000, 1000), batch_sizes(OTHER, 80_000)),
        ScheduleUpdate(9, TableCost.of(COST, TABLE.num_tokens), None, batch_sizes(COST, 60_000)),
    ]


def test_update_survives_json():
    for update in updates():
        assert ScheduleUpdate.from_json(json.loads(json.dumps(update.to_json()))) == update


@pytest.mark.parametrize("policy", POLICIES)
def test_updates_change_later_plans_alone_and_in_any_order_of_asking(policy):
    without, changed = policy_with(policy, []), policy_with(policy, [])
    before = [changed.plan(step).digest for step in range(5)]
    for update in updates():
        changed.assembler.costs.add(update)
    digests = [changed.plan(step).digest for step in range(40)]
    assert digests[:5] == before == [without.plan(step).digest for step in range(5)]
    assert all(changed.plan(step).digest != without.plan(step).digest for step in (5, 8))
    resumed = policy_with(policy, updates())  # a run that has the history from the start
    for step in (39, 9, 4, 20):
        assert resumed.plan(step).digest == digests[step]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_sample_is_lost_or_repeated_across_updates(policy):
    planner = policy_with(policy, updates())
    drawn, step = [], 0
    while True:
        plan = planner.plan(step)
        assert plan.position == len(drawn)
        drawn += [(int(e), int(i)) for e, i in zip(plan.epochs, plan.sample_ids, strict=True)]
        assert sorted(i for slot in plan.slots for members in slot for i in members) == list(range(plan.num_samples))
        step += 1
        if plan.next_position >= 2 * ORDER.epoch_size:
            break
    assert len(set(drawn)) == len(drawn)
    assert {pair for pair in drawn if pair[0] < 2} == {(e, i) for e in (0, 1) for i in range(1500)}


def test_batch_sizes_are_rewritten_at_the_border():
    planner = policy_with("dual_constraint", updates())
    sizes = {0: planner.batch_sizes, 5: np.array(batch_sizes(OTHER, 80_000)), 9: np.array(batch_sizes(COST, 60_000))}
    assert (sizes[5] != sizes[0]).any()
    for step in range(14):
        limit = sizes[max(border for border in sizes if border <= step)]
        plan = planner.plan(step)
        for slot in plan.slots:
            for members in slot:
                assert len(members) <= limit[TABLE.shape_ids[plan.sample_ids[members[0]]]]


def test_slow_rank_gets_less_and_planned_time_is_its_own():
    planner = policy_with("balanced", updates()[:1])
    plans = [planner.plan(step) for step in range(5, 25)]
    times = np.sum([plan.costs_us.sum(0) for plan in plans], axis=0)
    work = times / np.array([1, 1 / 0.7, 1, 1])
    assert work[1] / np.delete(work, 1).mean() == pytest.approx(0.7, abs=0.06)
    assert times.std() / times.mean() < 0.05
    # Speeds of another number of ranks, from before a resume, are left aside.
    assert CostHistory(COST, updates()).speed_at(6, 8) is None
    assert CostHistory(COST, updates()).speed_at(6, RANKS).tolist() == [1000, 700, 1000, 1000]


def test_histories_refuse_what_comes_out_of_order():
    history = CostHistory(TwoTermCost(0, 0, 0, 1, 0), updates())
    with pytest.raises(AssertionError):
        history.add(updates()[0])
