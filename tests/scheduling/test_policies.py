import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from adaptiveload.scheduling.balanced import enough_samples_per_step
from adaptiveload.scheduling.buckets import Buckets
from adaptiveload.scheduling.cost import TwoTermCost
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.metrics import idle_share, load_cv, where_ranks_meet
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import (
    POLICIES,
    ScheduleConfig,
    bucket_counts,
    build_policy,
    paper_batch_sizes,
    resolve_lookahead,
)
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry

COST = CostFile.read("configs/costs/wan_1_3b.yaml").law("two_term")
RANKS = 16


@cache
def mixed(num_samples):
    table = SampleTable.from_mix("configs/mixes/mixed.yaml", num_samples, seed=0)
    return table, EndlessOrder(np.arange(num_samples), seed=0)


def mixed_policy(num_samples, meet="slot", ranks=RANKS, **options):
    table, order = mixed(num_samples)
    config = ScheduleConfig(
        samples_per_step=28 * RANKS, **{"memory_limit_tokens": 105_600, "cost_exponent": 1.45, **options}
    )
    return build_policy(config, table, order, COST, ranks, meet)


def evenness(policy, steps, meet):
    plans = [policy.plan(step) for step in steps]
    work = np.concatenate([where_ranks_meet(plan.costs_us, meet) for plan in plans])
    return load_cv(work, "slot"), idle_share(work, "slot"), max(int(plan.num_tokens.max()) for plan in plans)


def small_table(counts):
    """`counts` maps (frames, height, width) to samples."""
    shapes = [shape for shape, count in counts.items() for _ in range(count)]
    keys = [f"{i:03d}" for i in range(len(shapes))]
    return SampleTable.from_columns(keys, keys, *zip(*shapes, strict=True), [32] * len(shapes), LatentGeometry())


# What the policies reach on the mix. Windows of 28 samples a rank, 24 of them; bounds from the paper and measurement.


def test_balanced_is_even_where_memory_has_room():
    cv, _, most_tokens = evenness(mixed_policy(480_000), range(24), "slot")
    assert cv <= 0.005
    assert most_tokens <= 105_600


def test_balanced_is_even_under_tight_memory():
    cv, _, most_tokens = evenness(mixed_policy(480_000, memory_limit_tokens=52_800), range(24), "slot")
    assert cv <= 0.04
    assert most_tokens <= 52_800
    _, idle, most_tokens = evenness(mixed_policy(480_000, "step", memory_limit_tokens=52_800), range(24), "step")
    assert idle <= 0.001
    assert most_tokens <= 52_800


def test_paper_policies_come_to_the_imbalance_that_the_paper_reports():
    steps = range(200, 440, 10)  # full buckets only
    cv, _, most_tokens = evenness(mixed_policy(480_000, policy="equal_token"), steps, "slot")
    assert 0.35 <= cv <= 0.45
    assert most_tokens <= 105_600
    dual = mixed_policy(480_000, policy="dual_constraint")
    cv, _, most_tokens = evenness(dual, steps, "slot")
    assert 0.12 <= cv <= 0.18
    assert most_tokens <= 105_600
    fixed = mixed_policy(480_000, policy="dual_constraint", compute_limit_factor=1.25)
    assert (dual.batch_sizes == fixed.batch_sizes).all()  # the choice of f


@pytest.mark.parametrize("meet", ["slot", "step"])
def test_compute_limit_factor_is_the_one_of_highest_tokens_per_s(meet):
    table, order = mixed(480_000)
    counts = bucket_counts(table, order)
    buckets = Buckets(table, counts, 105_600, 0, 1024, 1.45)
    assert buckets.best_factor(COST, RANKS, 4, meet) == 1.25
    curve = buckets.curve(COST, RANKS, 4, "slot")
    assert curve[1.25][1] == pytest.approx(0.15, abs=0.02)  # load CV, as the paper's 18.9 % of its own setting
    assert curve[1.0][1] == pytest.approx(0.29, abs=0.03)
    assert curve[2.0][1] == pytest.approx(0.40, abs=0.04)


# Promises of every policy.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("meet", ["slot", "step"])
def test_plan_out_of_the_blue_equals_plan_in_sequence(policy, meet):
    sequence = mixed_policy(3000, meet, policy=policy)
    digests = [sequence.plan(step).digest for step in range(40)]
    assert len(set(digests)) == 40
    for step in (39, 17, 3):
        assert mixed_policy(3000, meet, policy=policy).plan(step).digest == digests[step]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_once_an_epoch_and_positions_join_up(policy):
    planner, num_samples = mixed_policy(3000, policy=policy), 3000
    position, seen, step = 0, [], 0
    while position < 2 * num_samples:
        plan = planner.plan(step)
        assert (plan.step, plan.position) == (step, position)
        in_slots = sorted(i for slot in plan.slots for bin_ in slot for i in bin_ or ())
        assert in_slots == list(range(plan.num_samples))
        assert plan.normalizer == plan.num_samples == plan.next_position - position
        seen += list(zip(plan.epochs.tolist(), plan.sample_ids.tolist(), strict=True))
        position, step = plan.next_position, step + 1
    for epoch in (0, 1):
        assert sorted(i for e, i in seen if e == epoch) == list(range(num_samples))


def test_plan_arrays_agree_with_the_slots():
    table, _ = mixed(3000)
    for meet in ("slot", "step"):
        plan = mixed_policy(3000, meet, recompute="full", loss_weight_exponent=0.5).plan(2)
        tokens = table.num_tokens[plan.sample_ids]
        assert plan.costs_us.shape == plan.num_tokens.shape == (plan.num_slots, RANKS)
        assert plan.recompute == "full"
        for g, slot in enumerate(plan.slots):
            for rank, bin_ in enumerate(slot):
                if bin_ is None:
                    assert plan.costs_us[g, rank] == plan.num_tokens[g, rank] == plan.recomputed[g, rank] == 0
                    continue
                members = list(bin_)
                assert plan.num_tokens[g, rank] == tokens[members].sum()
                assert plan.costs_us[g, rank] == 60_000 + COST.sample_us(tokens[members], tokens[members]).sum()
        assert plan.weights == pytest.approx(tokens**0.5)
        assert plan.normalizer == pytest.approx((tokens**0.5).sum())
        for rank in range(RANKS):
            assert plan.micro_batches(rank) == [slot[rank] for slot in plan.slots if slot[rank] is not None]


def test_digest_changes_with_what_is_computed():
    plan = mixed_policy(3000).plan(0)
    assert replace(plan).digest == plan.digest
    swapped = (tuple(reversed(plan.slots[0])), *plan.slots[1:])
    for change in (
        {"slots": swapped},
        {"sample_ids": plan.sample_ids + 1},
        {"normalizer": 1.0},
        {"recompute": "full"},
        {"recomputed": plan.recomputed + 1},
        {"meet": "step"},
        {"weights": plan.weights * 2},
    ):
        assert replace(plan, **change).digest != plan.digest


# The default policy alone.


@pytest.mark.parametrize("lookahead", ["1", "4"])
def test_samples_of_a_step_do_not_depend_on_ranks_memory_or_costs(lookahead):
    table, order = mixed(3000)
    config = ScheduleConfig(samples_per_step=256, memory_limit_tokens=105_600, lookahead=lookahead)
    for step in (0, 3, 30):
        reference = build_policy(config, table, order, COST, 8, "slot").plan(step)
        for ranks, limit, cost, meet in (
            (16, 105_600, COST, "slot"),
            (64, 52_800, COST, "step"),
            (1, 60_000, TwoTermCost(0, 0, 1, 1, 0), "slot"),
        ):
            other = replace(config, memory_limit_tokens=limit)
            plan = build_policy(other, table, order, cost, ranks, meet).plan(step)
            assert (plan.sample_ids == reference.sample_ids).all()
            assert (plan.epochs == reference.epochs).all()
            assert plan.normalizer == reference.normalizer


@pytest.mark.parametrize("order_of", ["random", "clustered"])
def test_lookahead_deals_long_clips_evenly_and_in_whole_cohorts(order_of):
    """100 clips among 3,000 pictures in windows of 144 samples: 4.8 a window, in cohorts of 4."""
    table = small_table({(1, 16, 16): 2900, (5, 64, 64): 100})
    shuffled = np.random.default_rng(0).permutation(3000)
    order = EndlessOrder(np.arange(3000) if order_of == "clustered" else shuffled, seed=0, block_size=8)
    config = ScheduleConfig(samples_per_step=144, memory_limit_tokens=1000, lookahead="4")
    policy = build_policy(config, table, order, COST, 4, "slot")
    clips = np.array([(table.num_tokens[policy.plan(step).sample_ids] > 1).sum() for step in range(60)])
    # 3,000 samples are 20 windows and 120 samples more: an epoch ends in the middle of windows 20 and 41.
    whole = np.delete(clips, [20, 41])
    assert (whole % 4 == 0).all()
    assert set(whole.tolist()) <= {4, 8}
    busy = [policy.plan(step).costs_us for step in range(20)]
    assert max(idle_share(costs, "slot") for costs in busy) < 0.01


def test_lookahead_must_fit_a_window():
    table, order = mixed(3000)
    config = ScheduleConfig(samples_per_step=100, memory_limit_tokens=52_800, lookahead="101")
    with pytest.raises(ValueError, match=r"schedule\.lookahead=101"):
        build_policy(config, table, order, COST, 4, "slot")


def test_enough_samples_are_work_for_two_dearest_on_every_rank():
    costs = np.array([1] * 9 + [11])  # mean 2, so 11 samples a rank are worth two of the dearest
    assert enough_samples_per_step(costs, 8) == 88
    assert enough_samples_per_step(costs, 1) == 11


def test_lookahead_auto_looks_ahead_only_where_windows_are_too_small():
    table, order = mixed(3000)
    config = ScheduleConfig(samples_per_step=28 * RANKS, memory_limit_tokens=105_600, lookahead="auto")
    assert resolve_lookahead(config, table, order, COST, RANKS, "slot") == 1
    rare = SampleTable.from_mix("configs/mixes/worst_one_in_112.yaml", 40_000, seed=0)
    rare_order = EndlessOrder(np.arange(40_000), seed=0)
    assert resolve_lookahead(config, rare, rare_order, COST, RANKS, "slot") == RANKS


def test_short_samples_do_not_pile_up():
    table = small_table({(1, 16, 16): 300})
    config = ScheduleConfig(samples_per_step=300, memory_limit_tokens=100_000, max_samples_per_micro_batch=40)
    for policy in POLICIES:
        order = EndlessOrder(np.arange(300), seed=0)
        plan = build_policy(replace(config, policy=policy), table, order, COST, 2, "slot").plan(0)
        assert max(len(bin_) for slot in plan.slots for bin_ in slot) <= 40


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sixteen_samples_in_seven_thin_buckets_all_train(policy, ranks):
    # Every bucket holds fewer samples than its batch size; a floor rule would train on none.
    counts = {(1, 256, 256): 1, (17, 256, 256): 8, (33, 256, 256): 1, (17, 144, 256): 2}
    counts |= {(33, 144, 256): 2, (1, 256, 144): 1, (5, 256, 256): 1}
    table = small_table(counts)
    order = EndlessOrder(np.arange(16), seed=0)
    config = ScheduleConfig(policy=policy, samples_per_step=8, memory_limit_tokens=48_000, cost_exponent=1.45)
    planner = build_policy(config, table, order, COST, ranks, "slot")
    drawn, step = [], 0
    while len(drawn) < 48:  # three epochs
        plan = planner.plan(step)
        assert plan.num_samples > 0
        assert {len(slot) for slot in plan.slots} == {ranks}
        drawn += plan.sample_ids[plan.epochs < 3].tolist()
        step += 1
    assert np.bincount(drawn).tolist() == [3] * 16


def test_memory_of_texts_counts_against_the_limit():
    table = small_table({(1, 256, 256): 300, (17, 256, 256): 20})
    order = EndlessOrder(np.arange(320), seed=0)
    for policy in POLICIES:
        config = ScheduleConfig(policy=policy, samples_per_step=160, memory_limit_tokens=8192, text_memory_tokens=64)
        planner = build_policy(config, table, order, COST, 2, "slot")
        for step in range(2):
            plan = planner.plan(step)
            sizes = [[len(bin_) for bin_ in slot] for slot in plan.slots]
            assert (plan.num_tokens + 64 * np.array(sizes)).max() <= 8192
    with pytest.raises(ValueError, match="memory_limit_tokens is null"):
        build_policy(replace(config, memory_limit_tokens=None), table, order, COST, 2, "slot")


# Batch sizes of the paper's policies.


def test_buckets_thinner_than_their_batch_still_train():
    # Nine buckets, every one with fewer samples than its batch size: only partial buckets, at the end of the epoch.
    counts = {(frames, 128, 16 * k): 1 + (frames + k) % 5 for frames in (1, 5, 17) for k in (2, 3, 8)}
    table = small_table(counts)
    for policy in ("equal_token", "dual_constraint"):
        config = ScheduleConfig(policy=policy, memory_limit_tokens=100_000, compute_limit_factor=1000.0)
        order = EndlessOrder(np.arange(len(table)), seed=1)
        sizes = paper_batch_sizes(config, table, order, COST, 3, "slot")
        assert (sizes > np.bincount(table.shape_ids)).all()
        planner = build_policy(config, table, order, COST, 3, "slot")
        plans = [planner.plan(step) for step in range(planner.steps_in_first_epoch)]
        assert len(plans) >= 1
        assert sorted(np.concatenate([plan.sample_ids for plan in plans])) == list(range(len(table)))
        assert {len(slot) for plan in plans for slot in plan.slots} == {3}
        filler = [
            plan.costs_us[g, r] for plan in plans for g, s in enumerate(plan.slots) for r, b in enumerate(s) if not b
        ]
        assert filler
        assert set(filler) == {60_000}  # what a micro-batch costs without a sample


def test_ranks_draw_alone():
    planner = mixed_policy(3000, policy="equal_token")
    _, order = mixed(3000)
    owner = dict(zip(order.window(0, 3000).ids.tolist(), (np.arange(3000) % RANKS).tolist(), strict=True))
    plan = planner.plan(0)
    for rank in range(RANKS):
        drawn = [int(plan.sample_ids[i]) for bin_ in plan.micro_batches(rank) for i in bin_]
        assert drawn
        assert {owner[i] for i in drawn} == {rank}


# What a user can get wrong.


@pytest.mark.parametrize(("tokens", "limit", "refused"), [(75_600, 48_000, True), (48_000, 48_000, False)])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_sample_at_and_over_the_memory_limit(policy, tokens, limit, refused):
    table = small_table({(1, 16, 16 * tokens): 4, (1, 16, 16): 4})
    order = EndlessOrder(np.arange(8), seed=0)
    config = ScheduleConfig(policy=policy, samples_per_step=8, memory_limit_tokens=limit, cost_exponent=2.0)
    if refused:
        with pytest.raises(ValueError, match=r"75600 tokens.*memory_limit_tokens = 48000"):
            build_policy(config, table, order, COST, 2, "slot")
        return
    planner = build_policy(config, table, order, COST, 2, "slot")
    assert max(int(planner.plan(step).num_tokens.max()) for step in range(2)) == 48_000


def test_a_sample_over_the_compute_limit_is_named(caplog):
    table = small_table({(1, 16, 16 * 32_760): 4, (1, 16, 16 * 1560): 40})
    order = EndlessOrder(np.arange(44), seed=0)
    for factor, is_named in ((0.9, True), (1.0, False)):
        caplog.clear()
        config = ScheduleConfig(policy="dual_constraint", compute_limit_factor=factor, cost_exponent=2.0)
        build_policy(config, table, order, COST, 2, "slot")
        assert ("1x16x524160 is above the compute limit" in caplog.text) == is_named


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_above_the_memory_limit_is_refused_or_runs_alone(policy, caplog):
    table = small_table({(1, 64, 64): 30, (17, 128, 128): 1})  # 16 and 320 tokens
    order = EndlessOrder(np.arange(31), seed=0)
    config = ScheduleConfig(policy=policy, samples_per_step=31, memory_limit_tokens=200)
    with pytest.raises(ValueError, match=r"'030' has 320 tokens.*schedule.memory_limit_tokens = 200.*allow_oversize"):
        build_policy(config, table, order, COST, 2, "slot")
    planner = build_policy(replace(config, allow_oversize=True), table, order, COST, 2, "slot")
    assert "'030' has 320 tokens" in caplog.text
    for step in range(planner.steps_in_first_epoch):
        plan = planner.plan(step)
        for slot in plan.slots:
            for bin_ in slot:
                tokens = table.num_tokens[plan.sample_ids[list(bin_)]]
                assert tokens.sum() <= 200 or len(bin_) == 1
    held_out = EndlessOrder(np.arange(30), seed=0)  # the long one is not trained on
    build_policy(config, table, held_out, COST, 2, "slot")


@pytest.mark.parametrize(
    ("options", "meet", "message"),
    [
        ({"policy": "fair"}, "slot", "schedule.policy='fair': use balanced, "),
        ({}, "auto", "schedule.meet='auto': use slot or step"),
        ({"recompute": "half"}, "slot", "schedule.recompute"),
        ({"samples_per_step": 15}, "slot", r"15 samples a step.*16 ranks.*schedule.samples_per_step"),
        ({"lookahead": "auto"}, "slot", "schedule.lookahead"),
        ({"lookahead": "0"}, "slot", "schedule.lookahead"),
        ({"slots_per_step": 0}, "slot", "schedule.slots_per_step"),
        ({"memory_limit_tokens": 0}, "slot", "schedule.memory_limit_tokens"),
        ({"compute_limit_factor": -1.0}, "slot", "schedule.compute_limit_factor"),
        ({"slot_overhead_us": -1}, "slot", "schedule.slot_overhead_us"),
        ({"loss_weight_exponent": float("nan")}, "slot", "schedule.loss_weight_exponent"),
    ],
)
def test_configuration_is_checked(options, meet, message):
    table, order = mixed(3000)
    config = replace(ScheduleConfig(samples_per_step=448, memory_limit_tokens=105_600), **options)
    with pytest.raises(ValueError, match=message):
        build_policy(config, table, order, COST, RANKS, meet)


def test_scheduling_loads_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import adaptiveload.scheduling.policies, adaptiveload.scheduling.simulation, scripts.simulate_schedule\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
