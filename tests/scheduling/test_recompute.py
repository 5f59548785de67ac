"""How much of a micro-batch is computed again: never too little to fit, never more than that needs."""

from dataclasses import replace

import numpy as np
import pytest

from adaptiveload.scheduling.balanced import planned_us
from adaptiveload.scheduling.cost import AGAIN, PowerCost, TableCost, TwoTermCost, analytic_prior
from adaptiveload.scheduling.flops import MODELS, WAN_1_3B
from adaptiveload.scheduling.memory import memory_prior
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import ScheduleConfig, build_policy
from adaptiveload.scheduling.recompute import ALL_BLOCKS, Recompute
from adaptiveload.scheduling.refit import OnlineFit
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import ScheduleUpdate

COST = TwoTermCost(40_000, 40_000, 100, 10, 0.001)


@pytest.mark.parametrize("name", MODELS)
def test_as_few_blocks_as_fit(name):
    dims = MODELS[name]
    kept, again = (memory_prior(dims, level, "step", 8) for level in ("none", "attention"))
    capacity = kept.static_bytes + 100e9
    limits = kept.max_tokens(capacity, 1.0), again.max_tokens(capacity, 1.0)
    tokens = np.arange(1, limits[1] + 1, 97)
    shares = Recompute("auto", *limits).permille(tokens)

    def peak(permille):
        return (kept.token_bytes + (again.token_bytes - kept.token_bytes) * permille / ALL_BLOCKS) * tokens

    room = 100e9 + 2 * kept.token_bytes  # the limits are whole tokens
    assert (peak(shares) <= room).all()
    needs = shares > 0
    assert needs.any()
    assert (peak(shares - 1)[needs] > 100e9 - 2 * kept.token_bytes).all()
    assert not shares[tokens <= limits[0]].any()
    assert shares.max() >= 999
    assert Recompute("auto", *limits).permille(np.array([10 * limits[1]])) == ALL_BLOCKS


def test_the_other_levels_are_for_all_alike():
    tokens = np.array([0, 1, 10**9])
    assert Recompute("none").permille(tokens).tolist() == [0, 0, 0]
    assert Recompute("full").permille(tokens).tolist() == [1000] * 3
    with pytest.raises(ValueError, match=r"schedule\.recompute='half': use none, full or auto"):
        Recompute("half")
    with pytest.raises(ValueError, match=r"schedule\.kept_tokens=5 must be less than schedule\.most_tokens=5"):
        Recompute("auto", 5, 5)
    with pytest.raises(ValueError, match=r"needs schedule\.kept_tokens"):
        build_policy(ScheduleConfig(recompute="auto"), *mixed(100), COST, 1, "step")


def mixed(num_samples):
    return SampleTable.from_mix("configs/mixes/mixed.yaml", num_samples, seed=0), EndlessOrder(
        np.arange(num_samples), seed=0
    )


@pytest.mark.parametrize("meet", ["slot", "step"])
def test_balanced_plans_level_and_packing_together(meet):
    """What is planned is never slower than small micro-batches that keep everything; the next test has the others."""
    table, order = mixed(3000)
    config = ScheduleConfig(samples_per_step=112, memory_limit_tokens=105_600, recompute="auto")
    config = replace(config, kept_tokens=36_000, most_tokens=180_000)
    auto = build_policy(config, table, order, COST, 4, meet)
    for step in range(8):
        plan = auto.plan(step)
        assert plan.recompute == "attention"
        # Whole-step meetings make small micro-batches free but for their fixed part.
        small = build_policy(
            replace(config, memory_limit_tokens=36_000, allow_oversize=True), table, order, COST, 4, meet
        )
        assert planned_us(plan) <= planned_us(small.plan(step))
        sums = plan.num_tokens
        assert (plan.recomputed[sums <= 36_000] == 0).all()
        assert (plan.recomputed[sums > 36_000] > 0).all()
        tokens = table.num_tokens[plan.sample_ids]
        for g, slot in enumerate(plan.slots):
            for rank, members in enumerate(slot):
                if not members:
                    continue
                own = tokens[list(members)]
                again = COST.again_us(own).sum() * plan.recomputed[g, rank] // ALL_BLOCKS
                assert plan.costs_us[g, rank] == 40_000 + COST.sample_us(own, own).sum() + again


def test_where_a_micro_batch_costs_much_fewer_are_made():
    table, order = mixed(3000)
    dear = replace(COST, a_us=5_000_000, launch_floor_us=5_000_000)
    config = ScheduleConfig(samples_per_step=112, memory_limit_tokens=105_600, recompute="auto")
    config = replace(config, kept_tokens=36_000, most_tokens=180_000)
    cheap_plan, dear_plan = (build_policy(config, table, order, cost, 4, "step").plan(0) for cost in (COST, dear))
    assert dear_plan.num_slots < cheap_plan.num_slots
    assert dear_plan.recomputed.max() > 0


def test_prices_of_computing_again():
    """One pass of three of the linear layers; attention, which is kept, costs nothing."""
    tokens = np.array([1, 1560, 32_760, 75_600])
    prior = analytic_prior(WAN_1_3B, "h200", "auto")
    full, none = (analytic_prior(WAN_1_3B, "h200", level) for level in ("full", "none"))
    assert prior == none
    squares = full.b2_us - none.b2_us
    for again, length in zip(prior.again_us(tokens), tokens, strict=True):
        of_full = (full.sample_us(np.array([length]), np.array([0])) - none.sample_us(np.array([length]), [0]))[0]
        assert again == pytest.approx(of_full - squares * length**2, rel=0.01, abs=2)
    table = TableCost.of(prior, tokens)
    assert (table.again_us(tokens) == prior.again_us(tokens)).all()
    update = ScheduleUpdate(3, table)
    assert ScheduleUpdate.from_json(update.to_json()) == update
    # The paper's law does not know how much of it is attention; linear from 1,024 tokens on is near.
    power = PowerCost(0, 2, 1.5)
    assert power.again_us(np.array([1024, 4096])).tolist() == pytest.approx(
        [2 * 1024**1.5 * AGAIN, 8 * 1024**1.5 * AGAIN], abs=1
    )


def test_refits_take_out_what_was_computed_again():
    rng = np.random.default_rng(0)
    lengths = np.array([256, 1560, 7800, 32_760])
    fit = OnlineFit(lengths, 1)
    truth = TwoTermCost(0, 30_000, 500, 12, 0.001)
    for _ in range(200):
        counts = {int(s): int(rng.integers(1, 4)) for s in rng.choice(lengths, 2, replace=False)}
        share = float(rng.choice([0.0, 0.4, 1.0]))
        s, n = np.array(list(counts)), np.array(list(counts.values()))
        busy = 30_000 + (truth.sample_us(s, s) * n).sum() + share * (truth.again_us(s) * n).sum()
        fit.observe(0, busy / 1e6, counts, share)
    found = fit.refit(replace(truth, b1_us=20, b2_us=0.002), np.ones(1))
    assert found.b1_us == pytest.approx(12, rel=0.03)
    assert found.b2_us == pytest.approx(0.001, rel=0.03)
    other = OnlineFit(lengths, 1)
    other.load(fit.state())
    assert other.observations == fit.observations


def test_texts_take_memory_whatever_the_limit_counts():
    """A limit of the user's own counts no text; where recompute begins counts it."""
    table, order = mixed(3000)
    config = ScheduleConfig(samples_per_step=112, memory_limit_tokens=50_400, recompute="auto")
    config = replace(config, kept_tokens=36_000, most_tokens=180_000, recompute_text_tokens=100)
    plan = build_policy(config, table, order, COST, 4, "step").plan(0)
    counts = np.array([[len(members or ()) for members in slot] for slot in plan.slots])
    assert plan.num_tokens.max() == 50_400, "the longest clip of the mix"
    keeps = plan.num_tokens + 100 * counts <= 36_000
    assert (plan.recomputed[keeps] == 0).all()
    assert (plan.recomputed[~keeps] > 0).all()
