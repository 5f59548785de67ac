import numpy as np
import pytest

from adaptiveload.scheduling.cost import GPU_TFLOPS, PowerCost, TableCost, TwoTermCost, analytic_prior
from adaptiveload.scheduling.flops import MMDIT_20B, WAN_1_3B, WAN_14B
from adaptiveload.scheduling.memory import memory_prior
from adaptiveload.scheduling.metrics import idle_share, load_cv, step_time, step_time_cv, straggler, where_ranks_meet

TEXT = np.array([512])


def test_flops_of_the_released_sizes():
    # Counted by torch's FlopCounterMode over diffusers' models on the meta device, five digits given.
    assert WAN_1_3B.forward_flops(32_760, 512) == pytest.approx(2.8300e14, rel=2e-5)
    assert WAN_14B.forward_flops(32_760, 512) == pytest.approx(1.67837e15, rel=3e-6)
    for tokens, small, large in ((1560, 13.95e12, 126.4e12), (7800, 94.8e12, 725e12), (75_600, 3749e12, 19_570e12)):
        assert WAN_1_3B.train_flops(tokens, 512) == pytest.approx(small, rel=2e-3)  # three or four digits given
        assert WAN_14B.train_flops(tokens, 512) == pytest.approx(large, rel=2e-3)
    # Qwen-Image at 81x480x832, its last text MLP left out.
    assert MMDIT_20B.forward_flops(32_760, 512) == pytest.approx(1268e12, rel=1e-3)


def test_two_term_cost_is_additive_whole_and_floored():
    cost = TwoTermCost(launch_floor_us=900, a_us=100, c0_us=5, b1_us=0.5, b2_us=0.01)
    assert cost.sample_us(np.array([10, 100]), TEXT).tolist() == [11, 155]
    assert cost.micro_batch_us(np.array([0, 799, 801])).tolist() == [900, 900, 901]
    assert TwoTermCost(0, 0, 0, 1e-9, 0).sample_us(np.array([1]), TEXT).tolist() == [1]


def test_power_cost():
    cost = PowerCost(a_us=10, b_us=2, exponent=1.5)
    assert cost.sample_us(np.array([4, 100, 4]), TEXT).tolist() == [16, 2000, 16]
    assert cost.micro_batch_us(np.array([32])).tolist() == [42]


def test_coefficients_are_checked():
    with pytest.raises(ValueError, match="b1_us"):
        TwoTermCost(0, 0, 0, -1, 0)
    with pytest.raises(ValueError, match="a_us"):
        PowerCost(float("nan"), 1, 1)


def test_prior_comes_near_the_measured_fit():
    prior = analytic_prior(WAN_1_3B, "h200", "full")
    # A least-squares fit of H200 steps of Wan 1.3B gave 22.9 and .001585 us; its worst point is 21 % off.
    assert prior.b1_us == pytest.approx(22.9, rel=0.05)
    assert prior.b2_us == pytest.approx(0.001585, rel=0.05)
    assert analytic_prior(WAN_1_3B, "h200", "none").b1_us == pytest.approx(prior.b1_us * 3 / 4)
    with pytest.raises(ValueError, match="h200"):
        analytic_prior(WAN_1_3B, "gpu9000", "full")
    with pytest.raises(ValueError, match="recompute"):
        analytic_prior(WAN_1_3B, "h200", "some")
    assert "cpu" in GPU_TFLOPS


def test_table_cost_prices_as_the_law_it_was_made_of():
    law = TwoTermCost(launch_floor_us=900, a_us=100, c0_us=5, b1_us=0.5, b2_us=0.01)
    tokens = np.array([10, 400, 100, 100])
    table = TableCost.of(law, tokens)
    assert table.sample_us(tokens, TEXT).tolist() == law.sample_us(tokens, TEXT).tolist()
    sums = np.array([0, 799, 5000])
    assert table.micro_batch_us(sums).tolist() == law.micro_batch_us(sums).tolist()


def test_metrics():
    costs = [[1, 3], [2, 2]]  # rank 0 works 3, rank 1 works 5; slots take 3 and 2
    assert load_cv(costs, "slot") == pytest.approx((0.5 + 0) / 2)
    # At the step: ranks come to their last backward, of 4/3 each, after 5/3 and 11/3.
    assert where_ranks_meet(costs, "step") == pytest.approx(np.array([[5, 11], [4, 4]]) / 3)
    assert load_cv(costs, "step") == pytest.approx((3 / 8 + 0) / 2)
    assert step_time_cv(costs) == pytest.approx(1 / 4)
    assert step_time(costs, "step") == pytest.approx(5)
    assert idle_share(costs, "slot") == pytest.approx(1 - 4 / 5)
    assert idle_share(costs, "step") == pytest.approx(1 - 4 / 5)
    # Equal totals, but rank 1 comes 2/3 later to a last backward that is 2/3 shorter.
    assert step_time([[4, 1], [0, 3]], "step") == pytest.approx(4 + 2 / 3)
    assert step_time_cv([[4, 1], [0, 3]]) == 0
    assert straggler(costs) == 1
    assert load_cv([[0, 0]], "slot") == 0
    for bad in ([[1, float("nan")]], [1, 2], [[]], [[-1, 1]]):
        with pytest.raises(ValueError, match="costs must be"):
            load_cv(bad, "slot")
    with pytest.raises(ValueError, match="meet must be"):
        idle_share(costs, "auto")


def test_adapters_take_the_memory_of_what_is_trained():
    def static_gb(share: float) -> float:
        return memory_prior(WAN_14B, "full", "slot", ranks=1, trained_share=share).static_bytes / 1e9

    # 14.3 G weights: 20 bytes each and two gathered blocks of 40; frozen ones are bf16, 2 bytes.
    assert static_gb(1) == pytest.approx(14.28 * (20 + 6 / 20), rel=1e-2)
    assert static_gb(0) == pytest.approx(14.28 * (2 + 2 / 20), rel=1e-2)
    assert static_gb(0.01) == pytest.approx(0.01 * static_gb(1) + 0.99 * static_gb(0))
